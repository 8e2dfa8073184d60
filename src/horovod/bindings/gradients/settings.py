"""How gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.bindings.compression import CastCompressor, Compressor, NoneCompressor
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced.

    Attributes:
        op: how they are combined.
        prescale: multiplies them before.
        postscale: multiplies them after.
        compression: how they are sent.
        process_set: who takes part.
        sparse_as_dense: whether sparse gradients travel as dense ones.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor]
    process_set: ProcessSet
    sparse_as_dense: bool

    @property
    def one_by_one(self) -> bool:
        """Whether the user's own compressor wants to see every gradient by itself."""
        return self.compression is not NoneCompressor and not self._casts

    def wire_dtype(self, dtype: Any) -> Any:
        """Return what gradients of ``dtype`` are cast to before they are sent, or ``None``."""
        compression: Any = self.compression
        return compression.wire_dtype if self._casts and dtype in compression.from_dtypes else None

    @property
    def _casts(self) -> bool:
        # A user's compressor may be an object that only has the two functions.
        return isinstance(self.compression, type) and issubclass(self.compression, CastCompressor)

    @property
    def reduction(self) -> dict[str, Any]:
        """The same as arguments of a collective that reduces."""
        return {
            "op": self.op,
            "prescale_factor": self.prescale,
            "postscale_factor": self.postscale,
            "process_set": self.process_set,
        }
