"""Provides the kernels of an array library that is loaded already."""

from __future__ import annotations

import sys

from horovod.transports.kernels import Kernels

__all__ = ["kernels_named"]

_KERNELS: dict[str, Kernels] = {}


def kernels_named(name: str) -> Kernels:
    """Return the kernels called ``numpy`` or ``torch``; never load torch for them.

    Raises:
        LookupError: no kernels have this name, or their library is not loaded.
    """
    kernels = _KERNELS.get(name)
    if kernels is None:
        if name == "torch":
            if "torch" not in sys.modules:
                raise LookupError("torch kernels were asked for, but torch is not loaded")
            from horovod.transports.kernels_torch import TorchKernels

            kernels = TorchKernels()
        elif name == "numpy":
            from horovod.transports.kernels_numpy import NumpyKernels

            kernels = NumpyKernels()
        else:
            raise LookupError(f"kernels must be 'numpy' or 'torch'; received {name!r}; correct the adapter's kernels")
        _KERNELS[name] = kernels
    return kernels
