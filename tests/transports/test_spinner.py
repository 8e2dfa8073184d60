"""How often a rank looks before it sleeps."""

from __future__ import annotations

from horovod.transports.shm.spinner import Spinner


def test_who_waits_in_vain_looks_less_and_less() -> None:
    spinner = Spinner(crowded=False)
    turns = [len(spinner.turns()) for _ in range(64)]
    first = turns[0]
    assert first > 0
    assert turns[:4] == [first] * 4
    assert [index for index, count in enumerate(turns[4:], 4) if count] == [16, 32, 48]
    assert all(count > first for count in turns[16::16])


def test_success_makes_it_hope_again() -> None:
    spinner = Spinner(crowded=False)
    first = [len(spinner.turns()) for _ in range(10)]
    assert not first[-1]
    spinner.succeeded()
    assert [len(spinner.turns()) for _ in range(10)] == first


def test_ranks_that_share_cores_sleep_at_once() -> None:
    assert not any(len(Spinner(crowded=True).turns()) for _ in range(64))
