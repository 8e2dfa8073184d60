"""Keras on torch: gradients are reduced eagerly, outside torch.compile's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from horovod._keras.backends import Backend, Compare, Order
from horovod.torch import mpi_ops as hvd
from horovod.torch.compression import Compression
from horovod.torch.elastic.state import GENERATORS
from horovod.torch.runtime import comm
from horovod.torch.unsafe import keep_out_of_graphs

__all__ = ["backend"]

# Keras has already loaded torch's compiler, and a user may set jit_compile=True.
keep_out_of_graphs()


class _Torch(Backend):
    """See ``Backend``."""

    name = "torch"
    hvd = hvd
    comm = comm
    compression = Compression
    generators = GENERATORS  # Dropout uses these, not a Keras seed

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], order: Order) -> list[Any]:
        # Another rank may have a gradient that is missing here, so send zeros and a flag in its place.
        flags = torch.tensor([float(gradient is not None) for gradient in gradients])
        tensors, restore = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            dense = torch.zeros_like(variable.value) if gradient is None else gradient
            dense = dense.to_dense() if dense.layout is not torch.strided else dense.detach()
            wire, how = order.compression.compress(dense)
            tensors.append(wire)
            restore.append(how)
        flags = flags.to(tensors[0].device)
        comm.grouped_allreduce_([*tensors, flags], name=order.name or None, **order.keywords)
        present = flags.tolist()
        return [
            order.compression.decompress(tensor, how) if there else None
            for tensor, how, there in zip(tensors, restore, present, strict=True)
        ]

    def hold(self, variables: Sequence[Any]) -> list[Any]:
        return [variable.value.detach().clone() for variable in variables]

    def array(self, variable: Any) -> Any:
        return _array(variable.value)

    def shield(self, optimizer: Any) -> None:
        # torch.compile reads ``__class__``, which returns the plain class, and would bypass the distributed ``apply``.
        apply = torch.compiler.disable(type(optimizer).apply)  # type: ignore[no-untyped-call]
        optimizer.__dict__["apply"] = MethodType(apply, optimizer)

    def first_step(self, variables: Sequence[Any], act: Callable[[], None], compare: Compare) -> bool:
        act()
        compare(lambda: [_array(variable.value) for variable in variables])
        return True


def _array(value: torch.Tensor) -> Any:
    value = value.detach().cpu()
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()


backend: Backend = _Torch()
