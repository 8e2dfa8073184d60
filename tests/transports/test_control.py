"""The control page: who is woken, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from horovod.transports.shm.control import NO_GOAL, Control
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
