"""Samples of an epoch: each is taken once, whatever ranks are lost or join."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.bindings.elastic.sampler import Deal, Dealer, deal_list

sizes = st.integers(1, 9)
batch_sizes = st.integers(1, 5)


@given(left=st.integers(0, 300), size=sizes, batch_size=batch_sizes)
def test_a_deal_gives_every_sample_to_one_rank_in_equal_shares(left: int, size: int, batch_size: int) -> None:
    deal = Deal(left, size, batch_size)
    done: set[int] = set()
    for step in range(deal.steps):
        shares = [deal.share(step, rank).tolist() for rank in range(size)]
        lengths = {len(share) for share in shares}
        assert max(lengths) - min(lengths) <= 1
        may_have_one = batch_size < 4 or deal.steps == 1
        assert min(lengths) >= 2 - may_have_one
        assert max(lengths) <= batch_size + (2 - (batch_size < 4)) * (step == deal.steps - 1)
        handed = list(itertools.chain(*shares))
        assert not done.intersection(handed)
        done.update(handed)
        assert done == set(range(deal.taken(step + 1))), "the samples that were taken are the first ones"
        assert len(handed) == len(set(handed)) or left < size
    assert done == set(range(left))


@given(left=st.integers(0, 300), size=sizes, batch_size=st.integers(0, 5))
def test_lists_make_equally_many_batches_on_every_rank(left: int, size: int, batch_size: int) -> None:
    lists = [deal_list(left, rank, size, batch_size).tolist() for rank in range(size)]
    assert len({math.ceil(len(own) / max(batch_size, 1)) for own in lists}) == 1
    lengths = {len(own) for own in lists}
    assert max(lengths) - min(lengths) <= (batch_size > 0)
    everything = list(itertools.chain(*lists))
    assert set(everything) == set(range(left))
    is_uneven = left % size and (not batch_size or left // size % batch_size == 0)
    assert len(everything) - left == (size - left % size if is_uneven and left else 0)
    # After k batches of each rank the samples that were taken are the first ones.
    taken = [sample for own in lists for sample in own[: batch_size or 1]]
    assert set(taken) == set(range(min(left, size * (batch_size or 1))))


@given(
    count=st.integers(0, 200), batch_size=batch_sizes, seed=st.integers(0, 5), shuffle=st.booleans(),
    plan=st.lists(st.tuples(sizes, st.integers(0, 6), st.booleans()), max_size=8),
)  # fmt: skip
def test_an_epoch_through_losses_and_joins(
    count: int, batch_size: int, seed: int, shuffle: bool, plan: list[tuple[int, int, bool]]
) -> None:
    """Each entry of the plan: so many ranks do so many steps, and perhaps one more that fails."""
    state = Dealer(count, batch_size, shuffle, seed).state_dict()
    used: list[int] = []
    for size, steps, fails in [*plan, (3, count + 1, False)]:
        # Some are survivors, others are new: all get the state.
        dealers = [Dealer(count, batch_size, shuffle, seed) for _ in range(size)]
        for dealer in dealers:
            dealer.load_state_dict(state)
        batches = [dealer.batches(rank, size) for rank, dealer in enumerate(dealers)]
        left = dealers[0].left
        for _ in range(steps):
            handed = [next(own, None) for own in batches]
            if handed[0] is None:
                assert handed == [None] * size
                break
            for dealer in dealers:
                dealer.confirm()
            step = [sample for own in handed if own for sample in own]
            used += step if left >= size else sorted(set(step))
        if fails:
            for own in batches:
                next(own, None)
        assert len({str(dealer.state_dict()) for dealer in dealers}) == 1
        state = dealers[0].state_dict()
    assert sorted(used) == list(range(count))
    assert not Dealer(count, batch_size).left - count


def test_an_epoch_that_has_begun_goes_on() -> None:
    dealer = Dealer(10, 2, shuffle=True, seed=3)
    dealer.set_epoch(1)
    first = next(dealer.batches(0, 2))
    dealer.confirm()
    dealer.set_epoch(1)
    assert dealer.left == 6
    rest = [index for rank in range(3) for batch in dealer.batches(rank, 3) for index in batch]
    assert not set(first) & set(rest)
    assert len(rest) == 6
    dealer.set_epoch(2)
    assert dealer.left == 10
    assert not np.array_equal(dealer.order(), Dealer(10, 2, shuffle=True, seed=3).order())


def test_a_loop_without_batches_is_told_unless_it_is_the_first_one(caplog: pytest.LogCaptureFixture) -> None:
    dealer = Dealer(4, 2)

    def loop() -> int:
        count = 0
        for count, _ in enumerate(dealer.batches(0, 2), 1):
            dealer.confirm()
        return count

    assert loop() == 1
    dealer.reset()  # as after a loss behind the last step of an epoch
    assert (loop(), caplog.text) == (0, "")
    assert loop() == 0
    assert "call set_epoch(1) before it" in caplog.text
    caplog.clear()
    dealer.set_epoch(1)
    assert (loop(), caplog.text) == (1, "")


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 1 or more"):
        Dealer(3, 0)
