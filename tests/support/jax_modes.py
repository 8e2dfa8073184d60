"""Modes of JAX whose names differ between versions, and what its programs submit."""

from __future__ import annotations

from typing import Any

__all__ = ["names_submitted", "with_64_bits"]


def with_64_bits() -> Any:
    """Return a context in which JAX has 64-bit dtypes."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before JAX 0.8

    return enable_x64(True)


def names_submitted(program: Any, *args: Any) -> list[str]:
    """The keys of the collectives that one execution of a program submits, in order."""
    import jax

    from horovod import context

    ring = context.engine().ring
    ring.clear()
    jax.block_until_ready(program(*args))
    return [record[0].name for record in ring]
