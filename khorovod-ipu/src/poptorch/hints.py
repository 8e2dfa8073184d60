"""``identity_loss``, and hints for the hardware, which have no effect."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from poptorch.choices import ReductionType

__all__ = [
    "BeginBlock", "Block", "BlockFunction", "Hint", "ParallelPhasedExecution", "Phase", "PipelinedExecution",
    "SerialPhasedExecution", "ShardedExecution", "Stage", "TensorLocationSettings", "identity_loss", "ipu_print_tensor",
    "isRunningOnIpu", "nop", "recomputationCheckpoint", "recorded_losses", "removeBlocks", "serializedMatMul",
    "set_available_memory",
]  # fmt: skip

_Function = TypeVar("_Function", bound=Callable[..., Any])
_losses: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar("losses", default=None)


@contextlib.contextmanager
def recorded_losses() -> Iterator[list[torch.Tensor]]:
    """Return a context that collects the results of ``identity_loss``."""
    found: list[torch.Tensor] = []
    token = _losses.set(found)
    try:
        yield found
    finally:
        _losses.reset(token)


def isRunningOnIpu() -> bool:
    """Return whether this thread runs a training or inference model, not the plain model."""
    return _losses.get() is not None


def identity_loss(x: torch.Tensor, reduction: str | ReductionType) -> torch.Tensor:
    """Mark a tensor as the loss, or a part of it.

    Args:
        x: any shape.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: the reduction is unknown.
    """
    word = reduction.name.lower() if isinstance(reduction, ReductionType) else str(reduction)
    if word not in ("mean", "sum", "none", "noreduction"):
        raise ValueError(f'identity_loss: reduction must be "mean", "sum" or "none"; received {reduction!r}')
    loss = x.mean() if word == "mean" else x.sum() if word == "sum" else x
    seen = _losses.get()
    if seen is not None:
        seen.append(loss)
    return loss


class Hint:
    """A hint how the hardware runs a part of a model; without effect in software."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def accept(self, *_: Any, **__: Any) -> Any:
        """Return the object, so that calls can be chained."""
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Block(torch.nn.Module, Hint):
    """A part of a model for one device; without effect in software."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()

    @staticmethod
    def start(user_id: str = "", ipu_id: int | None = None) -> None:
        """Do nothing."""

    useAutoId = start


def BeginBlock(layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None) -> Any:
    """Return a layer unchanged: blocks are without effect in software."""
    return layer_to_call


def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Callable[[_Function], _Function]:
    """Return a decorator that changes nothing: blocks are without effect in software."""
    return lambda function: function


def removeBlocks(module: torch.nn.Module) -> None:
    """Do nothing: blocks are without effect in software."""


class Stage(Hint):
    """Blocks that run together, one after the other, or as a pipeline; a phase is several stages."""

    ipu = Hint.accept


Phase = ShardedExecution = PipelinedExecution = SerialPhasedExecution = ParallelPhasedExecution = Stage


class TensorLocationSettings(Hint):
    """Memory of tensors."""

    minElementsForOffChip = minElementsForReplicatedTensorSharding = useOnChipStorage = Hint.accept
    useReplicatedTensorSharding = useIOTilesToLoad = useIOTilesToStore = Hint.accept


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return tensor


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Return the tensors: nothing is recomputed."""
    return tensors[0] if len(tensors) == 1 else tensors


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Return the tensor: the memory is not partitioned."""
    return tensor


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: Any, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """Return the product of two tensors; ``mode``, ``factor`` and ``keep_precision`` are without effect."""
    return torch.matmul(lhs, rhs)


def ipu_print_tensor(tensor: torch.Tensor, title: str = "") -> torch.Tensor:
    """Print a tensor while the model runs.

    Args:
        tensor: any tensor; it is returned.
        title: text to print before it.
    """
    print(f"{title}: {tensor.tolist()}" if title else tensor.tolist(), flush=True)
    return tensor
