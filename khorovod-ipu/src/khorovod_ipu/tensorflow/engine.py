"""The collectives over the engine of ``horovod.tensorflow``."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

__all__ = ["EngineCollectives"]


class EngineCollectives:
    """Horovod's collectives; ``hvd.init()`` has been called."""

    host = "/device:CPU:0"

    def __init__(self) -> None:
        if not hvd.is_initialized():
            raise ValueError(
                "call hvd.init() before the strategy is made: from tensorflow.python.ipu import horovod as hvd"
            )
        self.rank = hvd.rank()
        self.size = hvd.size()

    def reduce(self, tensor: Any, mean: bool) -> Any:
        """Return the sum, or the mean, over all ranks."""
        return hvd.allreduce(tensor, op=hvd.Average if mean else hvd.Sum)

    def gather(self, tensor: Any) -> Any:
        """Concatenate all ranks' tensors along the first dimension."""
        return hvd.allgather(tensor)

    def broadcast(self, tensor: Any) -> Any:
        """Return rank 0's tensor."""
        return hvd.broadcast(tensor, root_rank=0)
