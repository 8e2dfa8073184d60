"""Which array library's kernels to use: one that is loaded already."""

from __future__ import annotations

import sys

from horovod.transports.kernels import Kernels

__all__ = ["kernels_named"]

_KERNELS: dict[str, Kernels] = {}


def kernels_named(name: str) -> Kernels:
    """Return the kernels called ``numpy`` or ``torch``; loads nothing that is not there already.

    Raises:
        LookupError: there are none of this name, or its library is not loaded.
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
            raise LookupError(f"kernels must be 'numpy' or 'torch'. Received: {name!r}; which adapter asks for them?")
        _KERNELS[name] = kernels
    return kernels
