"""Collectives in and around ``torch.inference_mode``, which belongs to a thread and marks tensors for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd


def average(value: torch.Tensor) -> torch.Tensor:
    """One line of code for training and validation, as in many scripts."""
    return hvd.allreduce(value, name="metric")


def metrics_of_validation_and_training() -> None:
    for rows in (2, 300_000):  # what rides along, and what does not
        with torch.inference_mode():
            inside = average(torch.ones(rows))
            gathered = hvd.allgather(torch.ones(rows, 1))
        assert torch.equal(average(torch.ones(rows)), inside)
        assert gathered.shape[0] == rows * hvd.size()
        assert not gathered.is_inference()
        # Results may go into differentiated code.
        weight = torch.ones(rows, requires_grad=True)
        (weight * inside).sum().backward()
        assert torch.equal(weight.grad, inside)


def in_place() -> None:
    for rows in (4, 300_000):
        with torch.inference_mode():
            tensors = [torch.ones(rows), torch.ones(rows, dtype=torch.bfloat16), torch.ones(rows, 2).t()[1:]]
            for tensor in tensors:
                assert tensor.is_inference()
                assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
                assert (tensor == hvd.size()).all()
        for tensor in tensors:
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
            assert hvd.synchronize(handle) is tensor
            assert (tensor == hvd.size() ** 2).all()
            hvd.broadcast_(tensor, 0)
        hvd.grouped_allreduce_(tensors)


def shared_memory() -> None:
    with torch.inference_mode():
        tensor = hvd.zeros(1000)
    tensor += 1
    assert (hvd.allreduce_(tensor, op=hvd.Sum) == hvd.size()).all()


CHECKS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (metrics_of_validation_and_training, in_place, shared_memory)
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(CHECKS))
@on_ranks()
def test_inference_mode(name: str) -> None:
    CHECKS[name]()
