"""Ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod.torch.runtime import comm

__all__ = ["UnevenInputs", "uneven_inputs"]


@dataclass
class UnevenInputs:
    """Result of ``uneven_inputs``.

    Attributes:
        last_rank: the rank that had the most to do; -1 before the end of the block.
    """

    last_rank: int = -1


@contextmanager
def uneven_inputs(
    model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[UnevenInputs]:
    """Run a block that ranks go through a different number of times, such as an epoch.

    Collective over all ranks. A rank that has come to the end stands by while the others go on: what they
    call inside the block is done without it. An average is still divided by the number of all ranks, so that
    a step counts as much as one in which all ranks take part.

    A rank that stands by takes no steps. Given the model and the optimizer, all ranks leave the block with
    those of the rank that worked longest.

    An exception inside the block leaves it at once, without waiting for the others; they learn that this
    rank is gone when it ends. ``break`` and ``return`` are no exceptions.

    Args:
        model: whose parameters and buffers to make the same at the end.
        optimizer: whose state to make the same at the end.

    Yields:
        A record of the block; ``last_rank`` is known after its end.

    Raises:
        PeerLostError: a rank died.
        NotInitializedError: ``init()`` was not called.

    Blocks at the end of the block until all ranks are there.
    """
    comm.rank()
    told = UnevenInputs()
    yield told
    told.last_rank = comm.join()
    if model is not None:
        broadcast_parameters(model.state_dict(), told.last_rank)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, told.last_rank)
