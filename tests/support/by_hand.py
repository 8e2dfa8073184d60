"""A linear model whose weights can be computed without any framework, however many ranks each step had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.bindings.elastic.sampler import Dealer

__all__ = ["weights_by_hand"]


def weights_by_hand(x: Any, y: Any, sizes: Sequence[int], rates: Sequence[float], **order: Any) -> Any:
    """Return the weights after steps of so many ranks each, with batches of 4; every epoch uses each sample once, and
    has its learning rate.
    """
    dealer, weights, steps = Dealer(len(x), 4, **order), np.zeros((x.shape[1], 1)), iter(sizes)
    for epoch, rate in enumerate(rates):
        dealer.set_epoch(epoch)
        used: list[int] = []
        while dealer.left:
            size = next(steps)
            shares = [next(iter(dealer.batches(rank, size))) for rank in range(size)]
            used += [index for share in shares for index in share]
            gradients = [2 * x[share].T @ (x[share] @ weights - y[share]) / len(share) for share in shares]
            weights = weights - rate * sum(gradients) / size
            dealer.confirm()
        assert sorted(used) == list(range(len(x)))
    assert next(steps, None) is None
    return weights
