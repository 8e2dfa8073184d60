"""Synchronize models, optimizers and Python objects across ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horovod.bindings.agreement import agree_on_names
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.torch.host_optimizer import HostMethods
from horovod.torch.optimizer_state import apply_state, describe_state, parameters_of, tensors_of
from horovod.torch.runtime import comm

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the root's parameters to every rank, in place.

    Collective over ``process_set``. Typically called with ``model.state_dict()`` or
    ``model.named_parameters()`` after ``init()``.

    Args:
        params: a dict of names to tensors (a ``state_dict()``), or an iterable of tensors or of
            ``(name, tensor)``. ``None`` entries are ignored.
        root_rank: global rank that sends its values.
        process_set: ranks that take part.

    Raises:
        RequestError: ``params`` has another type.
        MismatchError: the names, or a tensor's shape or dtype, differ between ranks; on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until all tensors have arrived.
    """
    tensors = _named_tensors(params)
    names = [f"tensor {index}" if name is None else str(name) for index, (name, _) in enumerate(tensors)]
    agree_on_names("broadcast_parameters", names, process_set)
    _broadcast(tensors, root_rank, process_set)


def _named_tensors(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    entries: list[Any]
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | torch.nn.Module | str | bytes):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        hint = "; pass its state_dict()" if isinstance(params, torch.nn.Module) else ""
        raise wrong_argument(
            "broadcast_parameters needs a dict of tensors, or a list of tensors or of (name, tensor). "
            f"Received: {type(params).__name__}{hint}"
        )
    found = []
    for entry in entries:
        if len(entry) != 2:
            raise wrong_argument(f"broadcast_parameters needs pairs (name, tensor). Received a tuple of {len(entry)}")
        name, tensor = entry
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise wrong_argument(
                f"broadcast_parameters moves tensors only. Received for {name!r}: {type(tensor).__name__}; "
                "use broadcast_object for it"
            )
        found.append((name, tensor))
    return found


def _broadcast(tensors: list[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast all tensors concurrently."""
    with torch.no_grad():
        handles = [comm.broadcast_async_(t.detach(), root_rank, name=n, process_set=process_set) for n, t in tensors]
        for handle in handles:
            comm.synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and options to every rank.

    Collective over ``process_set``. No optimizer step is done: parameters, step counts and schedules stay
    unchanged. Ranks without state get the root's state; if the root has none, the other ranks lose theirs.
    Options (learning rate, momentum, ...) keep the root's Python types. On ranks without state, missing
    gradients become zeros, as in Horovod.

    Args:
        optimizer: optimizer with the same parameters, in the same groups, on every rank.
        root_rank: global rank that sends its state.
        model: model in which to look for embeddings with sparse gradients.
        process_set: ranks that take part.

    Raises:
        RequestError: ``optimizer`` is not an optimizer; the root's is LBFGS, whose state has no fixed shape; or class
            or groups differ between ranks (raised on every rank).
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until all values have arrived.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        hint = "; pass the optimizer itself, not its state_dict()" if isinstance(optimizer, dict) else ""
        raise wrong_argument(
            f"broadcast_optimizer_state needs an optimizer of torch. Received: {type(optimizer).__name__}{hint}"
        )
    in_shards = isinstance(optimizer, HostMethods) and optimizer._share_before_broadcast(root_rank, process_set)
    if not optimizer.state and not in_shards:
        _fill_gradients(optimizer, model)
    is_sender = comm.rank() == root_rank and not isinstance(optimizer, torch.optim.LBFGS)
    description = describe_state(optimizer) if is_sender else None
    description = broadcast_object(description, root_rank, "optimizer_state", process_set)
    if description is None:
        raise wrong_argument("the state of torch.optim.LBFGS cannot be broadcast; start it fresh on every rank")
    problem = description.misfit(optimizer)
    problems = allgather_object((comm.rank(), problem), "optimizer_state.fit", process_set)
    if found := [f"rank {rank}: {text}" for rank, text in problems if text]:
        raise wrong_argument(
            f"the optimizer's class and groups must be those of rank {root_rank} on every rank. "
            f"Received: {'; '.join(found)}"
        )
    if comm.rank() != root_rank:
        apply_state(optimizer, description)
    named = [(f"optimizer_state.{name}", tensor) for name, tensor in tensors_of(optimizer)]
    _broadcast(list(named), root_rank, process_set)


def _fill_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = model.modules() if model is not None else ()
    embeddings = (m for m in modules if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and m.sparse)
    sparse = {id(embedding.weight) for embedding in embeddings}
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad and parameter.grad is None:
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
            layout = torch.sparse_coo if is_sparse else torch.strided
            parameter.grad = torch.zeros_like(parameter, layout=layout, requires_grad=False)
