"""How often a rank looks before it sleeps."""

from __future__ import annotations

import os

import pytest

from horovod.transports.shm import flags
from horovod.transports.shm.flags import Spinner


class _Counted:
    """Counts how often the core was offered to others, and keeps the time: a millisecond each time."""

    def __init__(self) -> None:
        self.offers = 0

    def sched_yield(self) -> None:
        self.offers += 1

    def monotonic(self) -> float:
        return self.offers / 1000


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    counted = _Counted()
    monkeypatch.setattr(os, "sched_yield", counted.sched_yield)
    monkeypatch.setattr(flags.time, "monotonic", counted.monotonic)
    return counted


def _in_vain(looker: Spinner, counted: _Counted) -> int:
    """Look until there is no patience left; return how many looks came before the core was offered to others."""
    before, eager = counted.offers, 0

    def has_come() -> bool:
        nonlocal eager
        eager += counted.offers == before
        return False

    assert not looker.look(has_come)
    return eager


def _found_at(looker: Spinner, count: int) -> None:
    looks = iter(range(1, count + 1))
    assert looker.look(lambda: next(looks) == count)


def test_who_waits_in_vain_looks_eagerly_less_and_less(counted: _Counted) -> None:
    looker = Spinner(crowded=False)
    eager = [_in_vain(looker, counted) for _ in range(64)]
    first = eager[0]
    assert first > 0
    assert eager[:4] == [first] * 4
    assert [index for index, count in enumerate(eager[4:], 4) if count] == [16, 32, 48]


def test_success_makes_it_hope_again(counted: _Counted) -> None:
    looker = Spinner(crowded=False)
    first = [_in_vain(looker, counted) for _ in range(16)]
    assert not first[-1]
    _found_at(looker, 1)
    assert [_in_vain(looker, counted) for _ in range(10)] == first[:10]


def test_success_of_polite_looks_makes_nobody_eager(counted: _Counted) -> None:
    looker = Spinner(crowded=False)
    eager = _in_vain(looker, counted)
    for _ in range(3):
        _found_at(looker, eager + 1)
    assert _in_vain(looker, counted) == 0


def test_ranks_that_share_cores_offer_theirs_before_a_second_look(counted: _Counted) -> None:
    looker = Spinner(crowded=True)
    for _ in range(64):
        before = counted.offers
        assert _in_vain(looker, counted) == 0
        assert counted.offers > before


def test_in_a_job_of_several_hosts_who_waits_sleeps_after_the_eager_looks(counted: _Counted) -> None:
    alone, one_of_several = (Spinner(crowded=False, polite=polite) for polite in (True, False))
    assert _in_vain(one_of_several, counted) == _in_vain(alone, counted) > 0
    before = counted.offers
    _in_vain(one_of_several, counted)
    assert counted.offers == before + 1
