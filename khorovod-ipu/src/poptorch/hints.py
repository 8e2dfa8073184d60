"""What scripts put into a model: the loss, and hints on where and how the hardware should run its parts."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from poptorch.choices import ReductionType

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "identity_loss",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "nop",
    "recomputationCheckpoint",
    "recorded_losses",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_losses: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar("losses", default=None)


@contextlib.contextmanager
def recorded_losses() -> Iterator[list[torch.Tensor]]:
    """Collect what ``identity_loss`` returns inside of the block."""
    found: list[torch.Tensor] = []
    token = _losses.set(found)
    try:
        yield found
    finally:
        _losses.reset(token)


def isRunningOnIpu() -> bool:
    """Whether a training or inference model computes, as opposed to the plain model; in the same thread."""
    return _losses.get() is not None


def identity_loss(x: torch.Tensor, reduction: str | ReductionType) -> torch.Tensor:
    """Mark a tensor as the loss, or a part of it.

    Args:
        x: any shape.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: another reduction.
    """
    word = reduction.name.lower() if isinstance(reduction, ReductionType) else str(reduction)
    if word not in ("mean", "sum", "none", "noreduction"):
        raise ValueError(f'identity_loss: reduction must be "mean", "sum" or "none"; received {reduction!r}')
    loss = x.mean() if word == "mean" else x.sum() if word == "sum" else x
    seen = _losses.get()
    if seen is not None:
        seen.append(loss)
    return loss


class Block(torch.nn.Module):
    """A part of a model for one device; of no effect in software.

    Args:
        user_id: its name.
        ipu_id: the device.
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()

    @staticmethod
    def useAutoId() -> None:
        """Accepted, without effect."""

    @staticmethod
    def start(user_id: str, ipu_id: int | None = None) -> None:
        """Accepted, without effect.

        Args:
            user_id: its name.
            ipu_id: the device.
        """

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def BeginBlock(layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None) -> Any:
    """A layer with which a new block begins; of no effect in software.

    Args:
        layer_to_call: the layer; returned.
        user_id: name of the block.
        ipu_id: the device.
    """
    return layer_to_call


def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Callable[[_Function], _Function]:
    """Decorate a function as a block; of no effect in software.

    Args:
        user_id: name of the block.
        ipu_id: the device.
    """
    return lambda function: function


def removeBlocks(module: torch.nn.Module) -> None:
    """Accepted, without effect.

    Args:
        module: the model.
    """


class _Hint:
    """An object of which only its existence is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def ipu(self, *_: Any) -> Any:
        """Accepted, without effect."""
        return self


class Stage(_Hint):
    """Blocks of a pipeline; of no effect in software."""


class Phase(_Hint):
    """Stages that run together; of no effect in software."""


class ShardedExecution(_Hint):
    """One block after the other; of no effect in software."""


class PipelinedExecution(_Hint):
    """Blocks as a pipeline; of no effect in software."""


class SerialPhasedExecution(_Hint):
    """Phases one after the other; of no effect in software."""


class ParallelPhasedExecution(_Hint):
    """Phases side by side; of no effect in software."""


class TensorLocationSettings:
    """Where tensors lie; of no effect in software. Its methods return it, so that calls can be strung together."""

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Accepted, without effect.

        Args:
            min_elements: size of a tensor.
        """
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Accepted, without effect.

        Args:
            min_elements: size of a tensor.
        """
        return self

    def useOnChipStorage(self, use: bool = True) -> TensorLocationSettings:
        """Accepted, without effect.

        Args:
            use: whether to.
        """
        return self

    useReplicatedTensorSharding = useIOTilesToLoad = useIOTilesToStore = useOnChipStorage


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself.

    Args:
        tensor: any.
    """
    return tensor


def recomputationCheckpoint(*tensors: Any) -> Any:
    """The tensors themselves.

    Args:
        *tensors: any.
    """
    return tensors[0] if len(tensors) == 1 else tensors


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """The tensor itself.

    Args:
        tensor: any.
        available_memory_proportion: without effect.
    """
    return tensor


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: Any, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """The product of two tensors.

    Args:
        lhs: any.
        rhs: any.
        mode: without effect.
        factor: without effect.
        keep_precision: without effect.
    """
    return torch.matmul(lhs, rhs)


def ipu_print_tensor(tensor: torch.Tensor, title: str = "") -> torch.Tensor:
    """Print a tensor while the model runs.

    Args:
        tensor: any; returned.
        title: what to print before it.
    """
    print(f"{title}: {tensor.tolist()}" if title else tensor.tolist(), flush=True)
    return tensor
