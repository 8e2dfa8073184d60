"""Settings of the reduction of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.bindings.compression import BucketCompressor, CastCompressor, Compressor, NoneCompressor
from horovod.bindings.reductions import Reduction

__all__ = ["ReduceSettings"]


@dataclass(frozen=True)
class ReduceSettings(Reduction):
    """Settings of the reduction of gradients."""

    compression: type[Compressor] | BucketCompressor = NoneCompressor  # compressor of the sent gradients
    sparse_as_dense: bool = False  # whether sparse gradients are sent as dense ones

    @property
    def one_by_one(self) -> bool:
        """Whether a stateless compressor of the user compresses gradients one by one, outside buckets."""
        return self.compression is not NoneCompressor and not self._casts and self.bucket_compressor is None

    @property
    def bucket_compressor(self) -> BucketCompressor | None:
        """The compressor of whole buckets, or None if ``compression`` is none."""
        return self.compression if isinstance(self.compression, BucketCompressor) else None

    def wire_dtype(self, dtype: str) -> str | None:
        """Return the name of the dtype to which gradients of ``dtype`` are cast for sending, or ``None``."""
        compression: Any = self.compression
        return compression.wire_dtype if self._casts and dtype in compression.from_dtypes else None

    @property
    def _casts(self) -> bool:
        return isinstance(self.compression, type) and issubclass(self.compression, CastCompressor)
