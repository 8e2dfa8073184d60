"""Compression of what goes over the wire: the interface, and what is the same for all frameworks.

A compressor is two functions: ``compress(tensor) -> (wire_tensor, context)`` and
``decompress(wire_tensor, context) -> tensor``. Users may write their own; it needs no base class.
The casting ones are a table entry per framework: which dtypes are floating-point, and how to cast.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["CastCompressor", "Compressor", "NoneCompressor"]


class Compressor:
    """Interface of a compressor; the methods are called on the class, no instance is made."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is sent in place of ``tensor``, and what ``decompress`` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor that ``compress`` was given, as far as it can be restored."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return ``tensor`` itself."""
        return tensor


class CastCompressor(Compressor):
    """Sends wider floating-point tensors as ``wire_dtype``; others go as they are.

    A framework's subclass says what its dtypes are.
    """

    #: The framework's dtype that goes over the wire.
    wire_dtype: ClassVar[Any]
    #: The dtypes that are cast to it.
    from_dtypes: ClassVar[frozenset[Any]]

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return ``tensor`` as ``dtype``, in the framework's words."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor`` as ``wire_dtype``, and its own dtype; ``None`` where nothing was cast."""
        if tensor.dtype not in cls.from_dtypes:
            return tensor, None
        return cls.cast(tensor, cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return ``tensor`` in the dtype that it had."""
        return tensor if ctx is None else cls.cast(tensor, ctx)
