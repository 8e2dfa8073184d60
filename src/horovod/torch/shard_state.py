"""Cut an optimizer's state into shards, and gather shards into a whole state in the format of torch checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod.bindings.misuse import out_of_turn, wrong_argument
from horovod.bindings.objects import allgather_object
from horovod.bindings.process_sets import ProcessSet
from horovod.torch.optimizer_state import dense_stride
from horovod.torch.runtime import comm
from horovod.torch.shards import WeightPiece

__all__ = ["cut", "gather"]


def cut(state: Mapping[str, Any], piece: WeightPiece) -> dict[str, Any]:
    """Return the part of a parameter's state that belongs to a piece of it.

    Raises:
        RequestError: the state holds a tensor that is neither a number nor of the parameter's shape.
    """
    parameter = piece.slot.parameter
    found: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[key] = copy.deepcopy(value)
        elif value.dim() == 0 and (parameter.dim() or key == "step"):
            # A fused optimizer keeps ``step`` on its device.
            found[key] = value.detach().to("cpu", copy=True)
        elif value.shape == parameter.shape:
            flat = torch.empty_strided(parameter.shape, dense_stride(parameter), dtype=value.dtype, device="cpu")
            flat.copy_(value)
            whole = flat.as_strided((flat.numel(),), (1,))
            found[key] = whole[piece.start : piece.start + piece.weights.numel()].clone()
        else:
            raise wrong_argument(
                f"the optimizer's state {key!r} of {piece.slot.name} must be a number or of the parameter's shape "
                f"{list(parameter.shape)}. Received: {list(value.shape)}"
            )
    return found


def gather(
    parameters: Iterable[tuple[str, torch.Tensor]],
    pieces: Mapping[int, tuple[WeightPiece, Mapping[str, Any]]],
    process_set: ProcessSet,
    to_all: bool,
) -> dict[torch.Tensor, dict[str, Any]] | None:
    """Return the whole state of parameters that have one, gathered one after the other; None on a rank that gets
    nothing. ``pieces`` are this rank's, with their states, by the id of the parameter. Without ``to_all`` only the
    set's first rank gets it.

    Raises:
        OptimizerUseError: a rank that had a part of the state has left.
    """
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    gets = to_all or process_set.rank() == 0
    for name, parameter in parameters:
        mine: Any = None
        if (found := pieces.get(id(parameter))) is not None and found[1]:
            mine = (found[0].start, found[0].weights.numel(), dict(found[1]))
        parts = [part for part in _exchange(mine, name, process_set, to_all) if part is not None]
        if gets and parts:
            whole[parameter] = _join(parts, parameter, name)
    return whole if gets else None


def _exchange(mine: Any, name: str, process_set: ProcessSet, to_all: bool) -> Sequence[Any]:
    label = f"DistributedOptimizer.state.{name}"
    if to_all:
        return allgather_object(mine, label, process_set)
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    splits = [len(data), *[0] * ((process_set.size() or 1) - 1)]
    received, counts = comm.synchronize(comm.alltoall_async(data, splits, name=label, process_set=process_set))
    # Unpickling is safe: the rendezvous has authenticated every member.
    return [pickle.loads(part.numpy().tobytes()) for part in received.split(counts.tolist()) if len(part)]


def _join(parts: Sequence[tuple[int, int, dict[str, Any]]], parameter: torch.Tensor, name: str) -> dict[str, Any]:
    if (there := sum(count for _, count, _ in parts)) != parameter.numel():
        raise out_of_turn(
            f"the optimizer's state of {name} is incomplete, {there} of {parameter.numel()} elements: a rank that had "
            "a part of it has left",
            "Load a checkpoint of the optimizer on every rank after ranks have changed.",
        )
    whole: dict[str, Any] = {}
    for key, example in parts[0][2].items():
        if not isinstance(example, torch.Tensor) or example.dim() == 0:
            whole[key] = example
            continue
        flat = torch.empty(parameter.numel(), dtype=example.dtype, device="cpu")
        for start, count, state in parts:
            flat[start : start + count] = state[key]
        whole[key] = flat.as_strided(parameter.shape, dense_stride(parameter))
    return whole
