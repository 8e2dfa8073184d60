"""What runs before a collective in a program, so that XLA cannot swap the two: see ``horovod.jax.lowering``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["results_before"]

_CALL, _CUSTOM_CALL = "func.call", "stablehlo.custom_call"
#: What XLA calls Python by: here, and for JAX's own callbacks on any device.
_PYTHON = re.compile(r"xla_.*python_.*callback")


def results_before(block: Any, since: Any, module: Any) -> list[Any]:
    """Return what the loops, branches and functions give that stand in a block and have collectives in them.

    Whoever takes these values runs after those collectives: one that has no part in any result is not there any more.

    Args:
        block: of the program that is being made.
        since: the operation behind which to look; None for all of the block.
        module: the program.

    Returns:
        Values of MLIR.
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
    """Return the names of the functions of a program that have collectives in them, or call one that has."""
    functions = [op.operation for op in module.body.operations if "sym_name" in op.operation.attributes]
    found: set[str] = set()
    while more := {name for name, op in _named(functions) if name not in found and _has(op, found)}:
        found |= more
    return found


def _named(functions: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(function.attributes["sym_name"].value, function) for function in functions]


def _has(op: Any, functions: set[str]) -> bool:
    """Return whether there is a collective, or a call of one of ``functions``, in an operation or what is inside."""
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
