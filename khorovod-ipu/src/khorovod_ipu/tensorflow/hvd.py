"""The function of ``tensorflow.python.ipu.horovod`` whose arguments differ from those of ``horovod.tensorflow``."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

__all__ = ["allreduce"]


def allreduce(
    tensor: Any, op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, name: str | None = None
) -> Any:
    """Combine a tensor over all ranks; for IndexedSlices gather the rows of all ranks.

    Args:
        tensor: same shape and dtype on every rank.
        op: Average (the default, None) or Sum.
        prescale_factor: multiplies the tensor before it is combined.
        postscale_factor: multiplies the result.
        name: key of the match; None numbers an eager call.

    Raises:
        NotImplementedError: Adasum.
    """
    if op == hvd.Adasum:
        raise NotImplementedError("the SDK's allreduce has no Adasum. Use hvd.allreduce of horovod.tensorflow")
    return hvd.allreduce(
        tensor, op=hvd.Average if op is None else op, name=name, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )  # fmt: skip
