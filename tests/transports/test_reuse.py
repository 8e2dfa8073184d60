"""Only values that come again are kept from one execution to the next, and never too many."""

from __future__ import annotations

import gc

from horovod.transports.shm.reuse import Budget, Recurring


class Keeper:
    """Keeps what it is told to."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.kept: list[int] = []

    def keep(self, count: int) -> None:
        """Keep ``count`` more."""
        self._budget.charge(self, count)
        self.kept += range(count)

    def forget(self) -> None:
        """See ``horovod.transports.shm.reuse.CacheHolder``."""
        self.kept = []


def test_a_value_is_kept_from_the_second_time_on() -> None:
    values = Recurring()
    first, second, third = (values.get("a", object) for _ in range(3))
    assert first is not second
    assert second is third
    assert values.kept == {"a": second}


def test_values_that_never_come_again_are_not_kept() -> None:
    values = Recurring(most=10)
    for key in range(1000):
        values.get(key, object)
    assert not values.kept


def test_there_are_never_more_values_than_allowed() -> None:
    values = Recurring(most=10)
    for key in range(100):
        assert values.get(key, object) is not values.get(key, object)
        assert len(values.kept) <= 10


def test_forgotten_values_are_made_again() -> None:
    values = Recurring()
    before = [values.get("a", object) for _ in range(2)][1]
    values.forget()
    assert values.get("a", object) is not before


def test_all_keepers_together_keep_no_more_than_the_budget() -> None:
    budget = Budget(most=100)
    keepers = [Keeper(budget) for _ in range(7)]
    for turn in range(200):
        keepers[turn % 7].keep(turn % 11)
        assert sum(len(keeper.kept) for keeper in keepers) <= 100


def test_a_budget_holds_no_keeper() -> None:
    budget = Budget(most=100)
    gone = Keeper(budget)
    gone.keep(60)
    del gone
    gc.collect()
    kept = Keeper(budget)
    kept.keep(60)
    assert len(kept.kept) == 60
