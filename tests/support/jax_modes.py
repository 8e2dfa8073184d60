"""Modes of JAX whose names differ between versions."""

from __future__ import annotations

from typing import Any

__all__ = ["with_64_bits"]


def with_64_bits() -> Any:
    """Return a context in which JAX has 64-bit dtypes."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before JAX 0.8

    return enable_x64(True)
