"""Lowering of collectives into compiled programs: a Python call on the memory of operands and results.

There are two ways:

    direct      XLA's own target for Python callbacks, without a JAX effect: costs a microsecond
    arrays      jax.experimental.io_callback, which copies: for devices other than the CPU, or if jaxlib lacks the
                parts that ``direct`` needs

All calls in one block of a program are chained: each takes the token of the previous call, and the results of loops,
branches and functions with collectives between the two. XLA may reorder independent operations, but the chain keeps
the calls in the order in which they were traced. This order is the same on all ranks, even if their programs differ
in a constant.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from horovod.bindings.failures import remember
from horovod.core.collectives import keeps_shape
from horovod.core.requests import ITEMSIZE
from horovod.errors import RequestError
from horovod.jax import unsafe
from horovod.jax.calls import CollectiveCall, run_in_program, split_watched
from horovod.jax.failures import let_go
from horovod.jax.primitives import collective_p
from horovod.transports.kernels_numpy import numpy_dtype

__all__ = ["InProgram", "register"]

_TOKEN = ShapedArray((), np.dtype(np.int32))
#: Lower equal calls separately: they are different collectives. Older versions of JAX always do so.
_EACH_BY_ITSELF = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}


class InProgram:
    """One collective of one program, as XLA calls it.

    Args:
        call: description of the collective.
        base: the key of the match, before a number makes it unique in the program.
        number: number of this call among those with the same key in the program, from 1.
        operands: number of operands.
        block: block of the program that contains the call.
    """

    def __init__(self, call: CollectiveCall, base: str, number: int, operands: int, block: Any) -> None:
        self.base = base
        self.block = block  # None after the first run
        self.token: Any = None  # token for the next call in the block; None after the first run
        self.held: Any = None  # see `lower_each_call`; None after the first run
        self.call = call
        self.operands = operands
        self._name = base if number == 1 else f"{base}#{number}"
        self._as_user = call.site.stand_in()

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Run the call. A token and other ordering values may follow the inputs; a token follows the outputs."""
        threading.current_thread()  # register this XLA thread with Python, so that reports can show that it waits
        # Drop MLIR objects: they keep the whole text of the program alive.
        self.block = self.token = self.held = None
        buffers, parameters = split_watched(self.call, inputs[: self.operands])
        sources = [np.asarray(buffer) for buffer in buffers]
        targets = [np.asarray(buffer) for buffer in outputs]
        targets.pop().fill(0)
        if keeps_shape(self.call.kind):
            sources = [
                target if source.ctypes.data == target.ctypes.data else source
                for source, target in zip(sources, targets, strict=True)
            ]
        try:
            self._as_user(lambda: run_in_program(self.call, self._name, sources, targets, parameters))
        except BaseException as error:
            remember(error)
            let_go([*sources, *targets])
            raise


#: Takes JAX's context, the collective and its operands; returns its results.
Way = Callable[[Any, InProgram, Sequence[Any]], Sequence[Any]]


def _lower(way: Way, ctx: Any, *operands: Any, call: CollectiveCall) -> Sequence[Any]:
    from jaxlib.mlir import ir

    module = ctx.module_context
    _refuse_several_devices(module.axis_context, call)
    block = ir.InsertionPoint.current.block
    earlier = [kept for kept in module.keepalives if isinstance(kept, InProgram)]
    base = _key(call, module)
    number = 1 + sum((other.base, other.call.kind) == (base, call.kind) for other in earlier)
    here = InProgram(call, base, number, len(operands), block)
    here.held = unsafe.lower_each_call(module)
    before = [other.token for other in earlier if other.block == block][-1:]
    avals = [_TOKEN] * len(before)
    if any(other.block != block for other in earlier):
        since = before[0].owner.operation if before else None
        nested = unsafe.results_before(block, since, module.module)
        before += nested
        avals += [ShapedArray(tuple(value.type.shape), _dtype_of(value)) for value in nested]
    ctx = ctx.replace(avals_in=[*ctx.avals_in, *avals], avals_out=[*ctx.avals_out, _TOKEN])
    *results, here.token = way(ctx, here, (*operands, *before))
    module.add_keepalive(here)
    return results


def _dtype_of(value: Any) -> Any:
    """Return the dtype of an MLIR value; int8 for element types without a numpy dtype."""
    return _dtypes().get(str(value.type.element_type), np.dtype(np.int8))


@functools.cache
def _dtypes() -> dict[str, Any]:
    """Return the possible dtypes of results of loops and branches by their MLIR names."""
    return {str(mlir.dtype_to_ir_type(dtype)): dtype for dtype in map(numpy_dtype, ITEMSIZE)}


def _key(call: CollectiveCall, module: Any) -> str:
    """Return the user's name of a call, or its program and line without a name; the same on all ranks."""
    program = str(module.module.operation.attributes["sym_name"].value).removeprefix("jit_")
    return (call.name or f"{program}/{call.site.short}") + call.suffix


def _refuse_several_devices(axis: Any, call: CollectiveCall) -> None:
    """Refuse a call that would run once per local device: a rank takes part only once."""
    mesh = getattr(axis, "mesh", None)
    if mesh is not None:
        count = mesh.size
    elif hasattr(axis, "num_devices"):
        count = axis.num_devices
    else:  # of pmap, before JAX made it a shard_map
        count = axis.axis_env.nreps
    if count > 1:
        raise RequestError(
            f"{call.verb} inside a program for {count} devices of one process (at {call.site}): a rank takes part "
            "once. Start one process for each device, or combine over the devices first (jax.lax.pmean), return the "
            f"result from the program, and call hvd.{call.verb} on it outside"
        )


# -- ways --------------------------------------------------------------------------------------------------------


def _directly(ctx: Any, here: InProgram, operands: Sequence[Any]) -> Sequence[Any]:
    count = len(operands)

    def called(_: Any, *buffers: Any) -> tuple[()]:
        here(buffers[:count], buffers[count:])
        return ()

    aliases = {index: to for index, to in _aliases(here).items() if not unsafe.is_borrowed(operands[index])}
    return unsafe.call_directly(ctx, called, operands, aliases)


def _through_arrays(ctx: Any, here: InProgram, operands: Sequence[Any]) -> Sequence[Any]:
    from jax.experimental import io_callback

    shapes = ctx.avals_out

    def called(*inputs: Any) -> list[Any]:
        outputs = [np.empty(shape.shape, shape.dtype) for shape in shapes]
        here(inputs, outputs)
        return outputs

    def inner(*arrays: Any) -> Any:
        # Pass only one element of arrays that only order the call, because everything passed is copied to the host.
        count = here.operands
        given = [*arrays[:count], *(jnp.ravel(array)[:1] for array in arrays[count:])]
        # Not pure_callback: XLA could merge several pure calls, or move one out of a loop.
        return io_callback(called, [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes], *given)

    return _flat(mlir.lower_fun(inner, multiple_results=True)(ctx, *operands))


def _aliases(here: InProgram) -> dict[int, int]:
    """Return operand-to-result indices that may share memory; XLA first copies operands that are still needed."""
    count = here.operands - len(here.call.watched)
    return {index: index for index in range(count)} if keeps_shape(here.call.kind) else {}


def _flat(results: Sequence[Any]) -> list[Any]:
    """Return results as a flat list; each may be a one-element list."""
    return [value for result in results for value in (result if isinstance(result, list | tuple) else (result,))]


def register(on_cpu: Way | None = None) -> None:
    """Register the lowering of collectives with JAX; None stands for the best available way on the CPU."""
    way = on_cpu or (_directly if unsafe.can_call_directly() else _through_arrays)
    mlir.register_lowering(collective_p, functools.partial(_lower, way), platform="cpu", **_EACH_BY_ITSELF)
    mlir.register_lowering(collective_p, functools.partial(_lower, _through_arrays), **_EACH_BY_ITSELF)
