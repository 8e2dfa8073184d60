"""Training with different numbers of batches on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from horovod.bindings.misuse import wrong_argument
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod.torch.runtime import comm

__all__ = ["uneven_inputs"]


@contextmanager
def uneven_inputs(
    model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Return a context in which ranks may run different numbers of batches, such as an epoch.

    Collective over all ranks. A rank that reaches the end waits while the others continue: their collectives inside
    the block run without it. An average is still divided by the number of all ranks, so that every step has the
    same weight.

    A waiting rank takes no steps. If the model and the optimizer are given, all ranks leave the block with the
    model and optimizer of the rank that finished last.

    An exception leaves the block immediately, without waiting for the others; they notice the lost rank when its
    process ends. ``break`` and ``return`` are not exceptions.

    Args:
        model: module whose parameters and buffers are synchronized at the end.
        optimizer: optimizer whose state is synchronized at the end.

    Raises:
        RequestError: an argument is of another kind.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        NotInitializedError: ``init()`` was not called.

    Blocks at the end of the block until all ranks have reached it.
    """
    comm.rank()
    for given, is_optimizer in ((model, False), (optimizer, True)):
        if given is not None and hasattr(given, "param_groups") is not is_optimizer:
            raise wrong_argument(
                "uneven_inputs takes a module and an optimizer, in this order. "
                f"Received: {type(model).__name__}, {type(optimizer).__name__}"
            )
    yield
    last_rank = comm.join()
    if model is not None:
        broadcast_parameters(model.state_dict(), last_rank)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, last_rank)
