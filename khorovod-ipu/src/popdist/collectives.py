"""Collectives among instances, on numpy arrays and torch tensors."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

import horovod.numpy
from popdist.backend import group_of

__all__ = ["allGather", "allReduceSum", "broadcast"]


def broadcast(data: Any, rootRank: int = 0, name: str | None = None, communicator: int | None = None) -> Any:
    """Overwrite ``data`` with the data of one instance.

    Args:
        data: array or tensor in host memory; the same shape and dtype on all instances.
        rootRank: index in the job of the instance that sends its values.
        name: key of the match; None matches in the order of the calls.
        communicator: id of a communicator; all instances, or those of ``execute_on_instances``, when omitted.

    Returns:
        ``data``.

    Raises:
        RuntimeError: ``popdist.init()`` was not called.
        TypeError: ``data`` is neither an array nor a tensor, or is read-only.
        ValueError: the root is not a member.
        MismatchError: shapes, dtypes or roots differ.

    Blocks until all instances of the communicator called.
    """
    group = group_of(communicator, "popdist.broadcast()")
    if rootRank not in group.members:
        raise ValueError(f"popdist.broadcast(): rootRank={rootRank} is none of the instances {list(group.members)}")
    hvd, values = _values(data, "broadcast")
    if group.process_set is not None:
        hvd.broadcast_(values, root_rank=rootRank, name=name, process_set=group.process_set)
    return data


def allReduceSum(data: Any, name: str | None = None, communicator: int | None = None) -> Any:
    """Overwrite ``data`` with the sum over instances.

    Args:
        data: array or tensor in host memory; the same shape and dtype on all instances.
        name: key of the match; None matches in the order of the calls.
        communicator: id of a communicator; all instances, or those of ``execute_on_instances``, when omitted.

    Returns:
        ``data``.

    Raises:
        RuntimeError: ``popdist.init()`` was not called.
        TypeError: ``data`` is neither an array nor a tensor, or is read-only.
        MismatchError: shapes or dtypes differ.

    Blocks until all instances of the communicator called.
    """
    group = group_of(communicator, "popdist.allReduceSum()")
    hvd, values = _values(data, "allReduceSum")
    if group.process_set is not None:
        hvd.allreduce_(values, op=hvd.Sum, name=name, process_set=group.process_set)
    return data


def allGather(data: Any, out: Any = None, name: str | None = None, communicator: int | None = None) -> Any:
    """Concatenate the data of all instances.

    Args:
        data: array or tensor in host memory; the same shape and dtype on all instances.
        out: target with as many elements as all instances have together; new memory when omitted.
        name: key of the match; None matches in the order of the calls.
        communicator: id of a communicator; all instances, or those of ``execute_on_instances``, when omitted.

    Returns:
        ``out``; without it an array or tensor with a new first dimension: the instances.

    Raises:
        RuntimeError: ``popdist.init()`` was not called.
        TypeError: ``data`` is neither an array nor a tensor.
        ValueError: ``out`` has another number of elements or another dtype.
        MismatchError: shapes or dtypes differ.

    Blocks until all instances of the communicator called.
    """
    group = group_of(communicator, "popdist.allGather()")
    hvd, values = _values(data, "allGather")
    own = values.reshape(1, *values.shape)
    count = len(group.members)
    if out is not None:
        _, target = _values(out, "allGather")
        if _count(target) != _count(own) * count or target.dtype != own.dtype:
            raise ValueError(
                f"popdist.allGather(): out needs {_count(own) * count} elements of {own.dtype}, received "
                f"{_count(target)} of {target.dtype}"
            )
    if group.process_set is None:
        gathered = own.copy() if isinstance(own, np.ndarray) else own.clone()
    else:
        gathered = hvd.allgather(own, name=name, process_set=group.process_set)
    if out is None:
        return gathered
    target[...] = gathered.reshape(target.shape)
    return out


def _count(values: Any) -> int:
    return int(np.prod(values.shape, dtype=np.int64))


def _values(data: Any, function: str) -> tuple[Any, Any]:
    """Return the binding for the data, and the data without their autograd history."""
    if isinstance(data, np.ndarray):
        if not data.flags.writeable:
            raise TypeError(f"popdist.{function}() writes into its array, and this one is read-only: give it a copy")
        return horovod.numpy, data
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return importlib.import_module("horovod.torch"), data.detach()
    raise TypeError(
        f"popdist.{function}() writes into a numpy array or a torch tensor, received {type(data).__name__}; wrap a "
        f"number or another object: numpy.array([value])"
    )
