"""Choose the backend for Keras."""

from __future__ import annotations

from horovod._keras.backends import Backend

__all__ = ["of_name"]


def of_name(name: str) -> Backend:
    """Return the named backend, and load only the binding that it needs.

    Raises:
        ImportError: there is no binding for this backend.
    """
    if name == "torch":
        from horovod._keras.on_torch import backend
    elif name == "tensorflow":
        from horovod._keras.on_tensorflow import backend
    elif name == "jax":
        from horovod._keras.on_jax import backend
    else:
        raise ImportError(
            f"horovod.keras works on Keras' backends tensorflow, torch and jax; KERAS_BACKEND is {name}", name=__name__
        )
    return backend
