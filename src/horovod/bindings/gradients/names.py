"""Names of the operations of a ``DistributedOptimizer``, and their form in messages; see ``horovod.core.labels``."""

from __future__ import annotations

from horovod.core import labels

__all__ = ["ADASUM", "FLAGS", "PREFIX", "WEIGHTS", "in_words"]

PREFIX = "DistributedOptimizer.gradients"
"""Prefix of the names of an optimizer's operations; a second optimizer adds a number."""

ADASUM = "DistributedOptimizer.adasum"
"""Prefix of the names of the operations of an Adasum optimizer, which combines the steps of the ranks."""

FLAGS = ".flags"
"""Suffix of the name of an operation that reduces only the presence flags of a bucket."""

WEIGHTS = ".weights"
"""Suffix of the name of the operation that sends a bucket's updated weights from their owners to all ranks."""


def in_words(name: str, times: int) -> str:
    """Return step and parameters of an operation as text: ``DistributedOptimizer step 118, layer3.weight``.

    The name is ``PREFIX``, perhaps ``#2``, then ``.survey``, ``.bucket0[first..last]`` or the name of a parameter. It
    is submitted once per step; ``times`` is 0 if unknown.
    """
    number, _, what = name.removeprefix(PREFIX).partition(".")
    who = f"DistributedOptimizer{number}"
    if what == "survey":
        return f"{who} before its first step"
    if what.endswith(WEIGHTS):
        return f"{in_words(name.removesuffix(WEIGHTS), times)}: new weights"
    what = what.removesuffix(FLAGS)
    if what.startswith("bucket") and what.endswith("]"):
        first, _, last = what.partition("[")[2][:-1].partition("..")
        what = first if first == last else f"{first} to {last}"
    return f"{who}{_step(times)}, {what}"


def _adasum_in_words(name: str, times: int) -> str:
    return f"DistributedOptimizer (Adasum){_step(times)}, {name.removeprefix(ADASUM + '.')}"


def _step(times: int) -> str:
    return f" step {times}" if times else ""


labels.register(PREFIX, in_words)
labels.register(ADASUM, _adasum_in_words)
