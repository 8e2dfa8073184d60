"""Code that depends on JAX internals; ``can_call_directly`` checks that this JAX has them.

Without ``call_directly`` collectives go through ``jax.experimental.io_callback``, see ``horovod.jax.lowering``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

__all__ = ["call_directly", "can_call_directly", "is_borrowed", "lower_each_call", "results_before"]

#: XLA's target for Python callbacks on buffers.
_TARGET = "xla_buffer_python_cpu_callback"
#: Attributes that mark a donated argument.
_DONATED = ("tf.aliasing_output", "jax.buffer_donor")
_CALL, _CUSTOM_CALL = "func.call", "stablehlo.custom_call"
#: Targets by which XLA calls Python: ours, and those of JAX's own callbacks on any device.
_PYTHON = re.compile(r"xla_.*python_.*callback")


def can_call_directly() -> bool:
    """Return whether this jaxlib has the parts that ``call_directly`` needs."""
    try:
        from jaxlib.mlir import ir
    except ImportError:
        return False
    fields = getattr(mlir.ModuleContext, "__annotations__", {})
    return hasattr(mlir.ModuleContext, "add_host_callback") and "host_callbacks" in fields and hasattr(ir, "Block")


def call_directly(
    ctx: Any, function: Callable[..., tuple[()]], operands: Sequence[Any], aliases: Mapping[int, int]
) -> Sequence[Any]:
    """Make XLA call a function with its context, operands and results, without an ordered JAX effect.

    ``aliases`` are operands that may share their memory with a result, by index.
    """
    module = ctx.module_context
    module.add_host_callback(function)
    rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True, operand_output_aliases=dict(aliases))
    results: Sequence[Any] = rule(ctx, *operands, index=np.uint64(len(module.host_callbacks) - 1))
    return results


def is_borrowed(value: Any) -> bool:
    """Return whether a value is an argument that is not donated, so that XLA would copy it before writing."""
    from jaxlib.mlir import ir

    block = value.owner
    if not isinstance(block, ir.Block):
        return False
    function = block.owner.operation
    if function.name != "func.func" or function.attributes["sym_name"].value != "main":
        return False
    given = ir.DictAttr(function.attributes["arg_attrs"][ir.BlockArgument(value).arg_number])
    return not any(name in given for name in _DONATED)


class _PerCall(dict[Any, Any]):
    """A cache of lowered functions that finds none with a collective, so that each call has a name of its own.

    With one name ranks whose XLA reorders the calls would mix them; with two they get an error.
    """

    def __init__(self, kept: Mapping[Any, Any], programs: Sequence[Any]) -> None:
        super().__init__(kept)
        self._programs, self._missed = programs, dict[Any, int]()
        #: JAX may copy a function's body: freed, its address, and so its tokens, would be those of the next function.
        self._held: list[Any] = []

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __missing__(self, key: Any) -> Any:
        self._missed[key] = len(self._programs)
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._missed.pop(key, -1) == len(self._programs):
            super().__setitem__(key, value)
        else:
            self._held.append(value)


def lower_each_call(module: Any) -> list[Any]:
    """Lower a function with a collective anew for each of its calls, which JAX would lower once.

    Returns:
        The objects that the caller must hold while JAX lowers the program.
    """
    caches = {name: getattr(module, name, None) for name in ("cached_primitive_lowerings", "lowering_cache")}
    for name, kept in caches.items():
        if type(kept) is dict:
            caches[name] = _PerCall(kept, module.keepalives)
            setattr(module, name, caches[name])
    return list(caches.values())


def results_before(block: Any, since: Any, module: Any) -> list[Any]:
    """Return the results of the loops, branches and calls in a block that contain collectives, after ``since`` if
    given.

    An operation that takes these values runs after those collectives, so XLA cannot reorder them.
    """
    holding = _functions_with(module)
    found: list[Any] = []
    for op in (op.operation for op in block.operations):
        if since is not None and op == since:
            found.clear()
        elif op.name != _CUSTOM_CALL and _has(op, holding):
            found += op.results
    return found


def _functions_with(module: Any) -> set[str]:
    """Return the names of the functions of a program that contain collectives, directly or through calls."""
    functions = [op.operation for op in module.body.operations if "sym_name" in op.operation.attributes]
    named = [(function.attributes["sym_name"].value, function) for function in functions]
    found: set[str] = set()
    while more := {name for name, function in named if name not in found and _has(function, found)}:
        found |= more
    return found


def _has(op: Any, functions: set[str]) -> bool:
    """Return whether an operation, or one nested in it, is a collective or calls one of ``functions``."""
    from jaxlib.mlir import ir

    found = False

    def visit(inner: Any) -> Any:
        nonlocal found
        operation = inner.operation
        if operation.name == _CALL:
            found |= operation.attributes["callee"].value in functions
        elif operation.name == _CUSTOM_CALL:
            found |= _PYTHON.fullmatch(operation.attributes["call_target_name"].value) is not None
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    op.walk(visit)
    return found
