"""Keras on JAX: gradients are reduced inside the compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod import context
from horovod._keras.backends import Backend, Order
from horovod.bindings.compression import Compression, compress, decompress
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import Kind
from horovod.errors import HorovodInternalError, RequestError
from horovod.jax import ops as hvd
from horovod.jax.failures import typed_errors
from horovod.jax.held import Held
from horovod.jax.placing import carry_out, make_call
from horovod.jax.runtime import comm

__all__ = ["backend"]


class _Jax(Backend):
    """See ``Backend``. Keras builds models before callbacks begin, and ``reduce`` compares values in the first step."""

    name = "jax"
    hvd = hvd
    comm = comm
    compression = Compression
    typed = staticmethod(typed_errors)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], order: Order) -> list[Any]:
        there = [index for index, gradient in enumerate(gradients) if gradient is not None]
        found = list(gradients)
        wires, contexts = compress(order.compression, [gradients[index] for index in there])
        # Values are visible only inside the compiled step, so the step compares them in its first run.
        watched = [variables[index] for index in there] if order.remedy else []
        call = make_call(
            Kind.ALLREDUCE, order.name, order.process_set, op=order.op, prescale=order.prescale,
            postscale=order.postscale, watched=tuple(variable.path for variable in watched), remedy=order.remedy,
        )  # fmt: skip
        results = carry_out(call, [*wires, *(variable.value for variable in watched)]) if wires else []
        reduced = decompress(order.compression, results, contexts)
        for index, gradient in zip(there, reduced, strict=True):
            found[index] = gradient
        return found

    def in_last_pass(self, iterations: Any, steps: int, combine: Callable[[], Any], own: Any) -> Any:
        # With JAX, Keras clips in every pass and uses only the result of the last one.
        return jax.lax.cond((iterations + 1) % steps == 0, combine, lambda: own)

    def wait(self, values: Any) -> None:
        jax.block_until_ready(values)

    def hold(self, variables: Sequence[Any]) -> list[Any]:
        return [Held(variable.value) for variable in variables]

    def put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value.value() if isinstance(value, Held) else value)

    def array(self, variable: Any) -> Any:
        return np.asarray(variable.value)

    def changes_all(self, is_known: bool) -> bool:
        return True  # the compiled step takes the arrays over (donation)

    def reraise(self, error: BaseException) -> None:
        try:
            with typed_errors():
                raise error
        except (HorovodInternalError, KeyboardInterrupt):
            raise
        except BaseException:
            return

    def broadcast(self, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        if not isinstance(tensor, jax.core.Tracer) and tensor.is_deleted():
            # A failed step has consumed this donated array. A receiving rank needs only its shape and dtype.
            if context.world().rank == root_rank:
                raise RequestError(
                    f"rank {root_rank} has no values to broadcast: the step that failed or was interrupted was given "
                    "the model's arrays by JAX, and did not return them. Make the model again, or load its weights"
                )
            tensor = jnp.zeros(tensor.shape, tensor.dtype)
        return hvd.broadcast(tensor, root_rank, name=name, process_set=process_set)


backend: Backend = _Jax()
