"""How gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.bindings.compression import BucketCompressor, CastCompressor, Compressor, NoneCompressor
from horovod.bindings.reductions import Reduction

__all__ = ["ReduceSettings"]


@dataclass(frozen=True)
class ReduceSettings(Reduction):
    """How gradients are reduced.

    Attributes:
        compression: how they are sent.
        sparse_as_dense: whether sparse gradients are sent as dense ones.
    """

    compression: type[Compressor] | BucketCompressor = NoneCompressor
    sparse_as_dense: bool = False

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
