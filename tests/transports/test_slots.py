"""Places of inline messages: nobody's data is overwritten before everybody has read it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from horovod.core.requests import NO_NOTE
from horovod.transports.shm.arena import INLINE_BYTES
from horovod.transports.shm.slots import SlotRing

READERS = (0, 1)


class _Flags:
    """Two ranks' flags."""

    def __init__(self) -> None:
        self.values = [0, 0]

    def reached(self, members: Sequence[int], value: int) -> bool:
        return all(self.values[member] >= value for member in members)


def _sender(nbytes: int) -> Any:
    step = 1 << (nbytes - 1).bit_length()
    return SimpleNamespace(nbytes=nbytes, step=step, rotation=max(step, min(4 << 20, 8 * step)))


@pytest.mark.parametrize("seed", range(20))
def test_a_place_is_not_taken_again_before_it_was_read(seed: int) -> None:
    chance, flags = random.Random(seed), _Flags()
    ring: Any = SlotRing(flags)  # type: ignore[arg-type]
    senders = [_sender(nbytes) for nbytes in (64, 64, 640, 5000, 300_000)]
    waiting: list[tuple[int, int, Any]] = []
    busy: list[tuple[int, int, Any]] = []
    fence = refused = 0
    for _ in range(3000):
        busy = [
            one for one in busy if not (one[2].slot.fence and flags.reached(one[2].slot.readers, one[2].slot.fence))
        ]
        if chance.random() < 0.5:
            sender, work = chance.choice(senders), SimpleNamespace(slot=None)
            start = ring.take(work, sender)
            if start == NO_NOTE:
                refused += 1
                continue
            end = start + sender.nbytes
            assert end <= INLINE_BYTES
            assert not [one for one in busy if start < one[1] and one[0] < end]
            waiting.append((start, end, work))
            busy.append((start, end, work))
        elif waiting:
            # Operations are executed in another order than they were submitted in; some are given up.
            _, _, work = waiting.pop(chance.randrange(min(len(waiting), 5)))
            fence += 1
            work.slot.readers, work.slot.fence = (READERS, fence) if chance.random() < 0.9 else ((), 1)
        for rank in READERS:
            flags.values[rank] = chance.randint(flags.values[rank], fence)
    assert len(busy) + refused < 3000


def test_one_after_the_other_takes_few_places() -> None:
    flags, places = _Flags(), set()
    ring: Any = SlotRing(flags)  # type: ignore[arg-type]
    for number in range(1, 100):
        work = SimpleNamespace(slot=None)
        places.add(ring.take(work, _sender(64)))
        work.slot.readers, work.slot.fence = READERS, number
        flags.values = [number, number - 1]
    assert len(places) <= 9
