"""The random generators of Python and numpy: read and restore their states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BUILT_IN", "Generator", "derived_seed", "fingerprint", "read", "write"]


class Generator(NamedTuple):
    """A random generator of this process.

    Attributes:
        read: returns a copy of the generator's state.
        write: sets a state that ``read`` returned.
        seed: seeds the generator with a number below 2**32.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    seed: Callable[[int], Any]


#: The generators that every process has.
BUILT_IN = (
    Generator(random.getstate, random.setstate, random.seed),
    Generator(lambda: np.random.get_state(legacy=False), np.random.set_state, np.random.seed),
)


def read(generators: Sequence[Generator]) -> list[Any]:
    """Return the states of generators."""
    return [generator.read() for generator in generators]


def write(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Set the states that ``read`` returned."""
    for generator, state in zip(generators, states, strict=True):
        generator.write(state)


def fingerprint(states: Sequence[Any]) -> str:
    """Return a text that is the same for equal states."""
    return str(_hash(states).hexdigest())


def derived_seed(states: Sequence[Any], rank: int) -> int:
    """Return a seed for a new rank, derived from the other ranks' states; it differs between ranks."""
    hashed = _hash(states)
    hashed.update(str(rank).encode())
    return int.from_bytes(hashed.digest()[:4], "little")


def _hash(states: Sequence[Any]) -> Any:
    hashed = hashlib.blake2b(digest_size=16)
    for state in states:
        _feed(hashed, state)
    return hashed


def _feed(hashed: Any, value: Any) -> None:
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        for item in value:
            _feed(hashed, item)
    else:
        hashed.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
