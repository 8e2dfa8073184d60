"""How gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.bindings.compression import BucketCompressor, CastCompressor, Compressor, NoneCompressor
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp

__all__ = ["ReduceSettings"]


@dataclass(frozen=True)
class ReduceSettings:
    """How gradients are reduced.

    Attributes:
        op: how they are combined.
        prescale: factor before that.
        postscale: factor after it.
        compression: how they are sent.
        process_set: the ranks that take part.
        sparse_as_dense: whether sparse gradients are sent as dense ones.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor] | BucketCompressor
    process_set: ProcessSet
    sparse_as_dense: bool

    @property
    def one_by_one(self) -> bool:
        """Whether gradients are compressed and reduced one by one, by a compressor of the user's without state."""
        return self.compression is not NoneCompressor and not self._casts and self.bucket_compressor is None

    @property
    def bucket_compressor(self) -> BucketCompressor | None:
        """The compressor of whole buckets, if that is one."""
        return self.compression if isinstance(self.compression, BucketCompressor) else None

    def wire_dtype(self, dtype: str) -> str | None:
        """Return the name of the dtype that gradients of ``dtype`` are cast to before they are sent, or ``None``."""
        compression: Any = self.compression
        return compression.wire_dtype if self._casts and dtype in compression.from_dtypes else None

    @property
    def _casts(self) -> bool:
        return isinstance(self.compression, type) and issubclass(self.compression, CastCompressor)

    @property
    def reduction(self) -> dict[str, Any]:
        """Arguments for a collective that reduces."""
        return {
            "op": self.op,
            "prescale_factor": self.prescale,
            "postscale_factor": self.postscale,
            "process_set": self.process_set,
        }
