"""How a collective gets into a compiled program: as a call of Python on the memory of its operands and results.

There are two ways to do it:

    direct      XLA's own target for Python callbacks, without an effect that JAX would know: costs a microsecond
    arrays      jax.experimental.io_callback, which copies: on devices other than the CPU, and where the parts of jaxlib
                that ``direct`` needs have moved

All calls in one block of a program are chained: each takes a token that the one before has made, and the results of
loops, branches and functions between the two that have collectives in them. So XLA, which is free to move what does not
depend on each other, keeps them in the order in which they were traced, which is the same on all ranks even where their
programs differ in a constant.
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
from horovod.core.requests import Kind
from horovod.errors import RequestError
from horovod.jax import unsafe
from horovod.jax.calls import CollectiveCall, run_in_program, split_watched
from horovod.jax.failures import let_go
from horovod.jax.gpus import warn_once
from horovod.jax.primitives import collective_p

__all__ = ["InProgram", "register"]

_TOKEN = ShapedArray((), np.dtype(np.int32))
_IN_PLACE = (Kind.ALLREDUCE, Kind.BROADCAST)
#: The dtypes that results of loops and branches may have.
_DTYPES = (
    bool, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, jnp.bfloat16,
    np.float32, np.float64, np.complex64, np.complex128,
)  # fmt: skip
#: Two calls that look the same are two calls. Older versions of JAX lower each by itself anyway.
_EACH_BY_ITSELF = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}


class InProgram:
    """One collective of one program, as XLA calls it.

    Args:
        call: what to do.
        base: the key of the match, before it is told from others in the program.
        number: 1, or the how-many-th of this key in the program.
        operands: how many.
        block: of the program, which it stands in.

    Attributes:
        call: as given.
        base: as given.
        operands: as given.
        block: as given; None once it runs.
        token: what it leaves for the next one in its block; None once it runs.
    """

    def __init__(self, call: CollectiveCall, base: str, number: int, operands: int, block: Any) -> None:
        self.base = base
        self.block = block
        self.token: Any = None
        self.call = call
        self.operands = operands
        self._name = base if number == 1 else f"{base}#{number}"
        self._as_user = call.site.stand_in()

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Carry the call out.

        Args:
            inputs: of the call, perhaps followed by a token.
            outputs: of the call, followed by a token.
        """
        threading.current_thread()  # so that Python knows this thread of XLA's, and reports can tell that it waits
        # MLIR's objects keep the whole text of the program alive.
        self.block = self.token = None
        buffers, parameters = split_watched(self.call, inputs[: self.operands])
        sources = [np.asarray(buffer) for buffer in buffers]
        targets = [np.asarray(buffer) for buffer in outputs]
        targets.pop().fill(0)
        if self.call.kind in _IN_PLACE:
            sources = [
                target if _are_one(source, target) else source for source, target in zip(sources, targets, strict=True)
            ]
        try:
            self._as_user(lambda: run_in_program(self.call, self._name, sources, targets, parameters))
        except BaseException as error:
            remember(error)
            let_go([*sources, *targets])
            raise


#: Takes JAX's context, the collective and its operands; returns its results.
Way = Callable[[Any, InProgram, Sequence[Any]], Sequence[Any]]


def _are_one(source: Any, target: Any) -> bool:
    return bool(source.ctypes.data == target.ctypes.data)


def _lower(way: Way, ctx: Any, *operands: Any, call: CollectiveCall) -> Sequence[Any]:
    from jaxlib.mlir import ir

    module = ctx.module_context
    _refuse_several_devices(module.axis_context, call)
    block = ir.InsertionPoint.current.block
    earlier = [kept for kept in module.keepalives if isinstance(kept, InProgram)]
    base = _key(call, module)
    number = 1 + sum((other.base, other.call.kind) == (base, call.kind) for other in earlier)
    here = InProgram(call, base, number, len(operands), block)
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
    """Return the dtype of a value of MLIR; one of a byte for what numpy has none for."""
    return _dtypes().get(str(value.type.element_type), np.dtype(np.int8))


@functools.cache
def _dtypes() -> dict[str, Any]:
    """Return the dtypes by MLIR's names of them."""
    return {str(mlir.dtype_to_ir_type(np.dtype(dtype))): np.dtype(dtype) for dtype in _DTYPES}


def _key(call: CollectiveCall, module: Any) -> str:
    """Return the user's name for a call, or else its program and line; the same on all ranks."""
    program = str(module.module.operation.attributes["sym_name"].value).removeprefix("jit_")
    return (call.name or f"{program}/{call.site.short}") + call.suffix


def _refuse_several_devices(axis: Any, call: CollectiveCall) -> None:
    """Refuse what would run once for each local device: a rank has one."""
    mesh = getattr(axis, "mesh", None)
    count = mesh.size if mesh is not None else getattr(axis, "num_devices", 1)
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

    warn_once()
    shapes = ctx.avals_out

    def called(*inputs: Any) -> list[Any]:
        outputs = [np.empty(shape.shape, shape.dtype) for shape in shapes]
        here(inputs, outputs)
        return outputs

    def inner(*arrays: Any) -> Any:
        # Arrays that only order the call pass one element: everything passed is copied to the host.
        count = here.operands
        given = [*arrays[:count], *(jnp.ravel(array)[:1] for array in arrays[count:])]
        # Not a pure one, of which XLA would make several one, or leave one out of a loop.
        return io_callback(called, [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes], *given)

    return _flat(mlir.lower_fun(inner, multiple_results=True)(ctx, *operands))


def _aliases(here: InProgram) -> dict[int, int]:
    """Return which operand may share its memory with which result; XLA copies first what is still needed."""
    count = here.operands - len(here.call.watched)
    return {index: index for index in range(count)} if here.call.kind in _IN_PLACE else {}


def _flat(results: Sequence[Any]) -> list[Any]:
    """Return the values of results, which may be lists of one."""
    return [value for result in results for value in (result if isinstance(result, list | tuple) else (result,))]


def register(on_cpu: Way | None = None) -> None:
    """Tell JAX how to compile collectives.

    Args:
        on_cpu: the way to go on the CPU; None for the best one there is.
    """
    way = on_cpu or (_directly if unsafe.can_call_directly() else _through_arrays)
    mlir.register_lowering(collective_p, functools.partial(_lower, way), platform="cpu", **_EACH_BY_ITSELF)
    mlir.register_lowering(collective_p, functools.partial(_lower, _through_arrays), **_EACH_BY_ITSELF)
