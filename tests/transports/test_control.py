"""The control page: who is woken, and when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from horovod.errors import PeerLostError, StallError
from horovod.transports.groups import wait_until
from horovod.transports.shm.control import NO_GOAL, Control
from horovod.transports.shm.flags import Flags
from horovod.transports.shm.mapping import create_memfd


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Control]]:
    """Four ranks' views of one page, in one process."""
    fd = create_memfd("horovod-test", Control.nbytes(4))
    pages = [Control(fd, rank, 4, cores=2) for rank in range(4)]
    os.close(fd)
    yield pages
    for page in pages:
        page.close()


def _listen(page: Control, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rung: list[int] = []
    monkeypatch.setattr(page, "ring", rung.append)
    return rung


def test_who_is_rung_later_while_others_are_rung_for_is_not_forgotten(
    ranks: list[Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ranks[0]
    page._deferred = {1, 2}
    monkeypatch.setattr(page, "_is_behind", lambda _: page._deferred.add(3) or True)
    page.ring_deferred()
    assert page._deferred == {3}


def test_the_last_to_come_wakes_who_waits_for_all(ranks: list[Control], monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper, first, last, _ = ranks
    members = (0, 1, 2)
    sleeper.post(5, members)
    sleeper.announce(5)
    rung = _listen(first, monkeypatch)
    first.post(5, members)
    assert rung == []
    rung = _listen(last, monkeypatch)
    last.post(6, members)
    assert rung == [0]


def test_who_waits_for_no_flag_is_not_woken_by_one(ranks: list[Control], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks[0].announce(NO_GOAL)
    rung = _listen(ranks[1], monkeypatch)
    ranks[1].post(7, (0, 1))
    assert rung == []


def test_rank_0_decides_how_far_rounds_go(ranks: list[Control]) -> None:
    assert all(page.crowded and page.has_large_rounds for page in ranks)
    fd = create_memfd("horovod-test", Control.nbytes(2))
    first, second = Control(fd, 0, 2, cores=2), Control(fd, 1, 2, cores=1)
    os.close(fd)
    # A core that was lost between the two looks must not make them disagree.
    assert second.crowded
    assert not first.has_large_rounds
    assert not second.has_large_rounds
    first.close()
    second.close()


@pytest.mark.parametrize("has_done", [True, False])
def test_a_rank_that_does_its_part_and_leaves_while_it_is_checked_is_not_lost(
    has_done: bool, ranks: list[Control]
) -> None:
    class Watch:
        is_alarmed = True

        def check(self, rank: int, waited_s: float) -> None:
            if has_done:
                ranks[1].post(5, (0, 1))
            raise PeerLostError("rank 1 has left", rank=1)

    flags = Flags(ranks[0], Watch())
    waits: list[Callable[[], None]] = [
        lambda: wait_until(lambda slice_s: flags.reached((1,), 5), [1], Watch()),
        lambda: flags.wait((0, 1), 5),
    ]
    for wait in waits:
        ranks[0].post(5 * has_done, (0, 1))
        ranks[1].words64[ranks[1].flag[1]] = 0
        if has_done:
            wait()
        else:
            with pytest.raises(PeerLostError):
                wait()


def test_the_error_of_an_engine_does_not_hide_the_rank_that_is_lost() -> None:
    class Watch:
        is_alarmed = True

        def check(self, rank: int, waited_s: float) -> None:
            raise StallError("rank 1 waited in vain")

    looks = iter([False])

    def is_over(slice_s: float) -> bool:
        for look in looks:
            return look
        raise RuntimeError("connection closed by peer")

    with pytest.raises(StallError):
        wait_until(is_over, [1], Watch())
