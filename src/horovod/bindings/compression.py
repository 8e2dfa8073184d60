"""Compression of data between ranks, for all frameworks.

``compression=`` takes one of three things:

- ``Compression.none``, ``.fp16`` or ``.bf16``;
- a class or object with ``compress(tensor) -> (wire, ctx)`` and ``decompress(wire, ctx) -> tensor``, as in Horovod;
- an object of a subclass of ``BucketCompressor``, which keeps a state for each bucket of gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any, ClassVar

from horovod import context
from horovod.bindings.misuse import wrong_argument
from horovod.engine.calls import named_only
from horovod.logs import logger

__all__ = [
    "BF16Compressor",
    "BucketCompressor",
    "CastCompressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "cast",
    "check_compression",
    "compress",
    "decompress",
]


@singledispatch
def cast(tensor: Any, dtype: str) -> Any:
    """Return ``tensor`` cast to the named dtype; a framework without ``astype`` registers its own function."""
    return tensor.astype(dtype)


class Compressor:
    """Interface of a compressor without state. The methods are called on the class; no instance is created."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor that ``compress`` was given, as far as it can be restored."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor`` itself, and no context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return ``tensor`` itself."""
        return tensor


class CastCompressor(Compressor):
    """Casts some floating-point dtypes to another one for sending; sends tensors of other dtypes unchanged."""

    #: Name of the dtype on the wire.
    wire_dtype: ClassVar[str]
    #: Names of the dtypes that are cast to ``wire_dtype``.
    from_dtypes: ClassVar[frozenset[str]]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor`` cast to ``wire_dtype``, and the name of its own dtype; ``None`` if nothing was cast."""
        # A torch dtype has no ``name``; its str() ends with the name, as in "torch.float32".
        name = getattr(tensor.dtype, "name", None) or str(tensor.dtype).rpartition(".")[2]
        return (cast(tensor, cls.wire_dtype), name) if name in cls.from_dtypes else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return ``tensor`` cast back to its original dtype."""
        return tensor if ctx is None else cast(tensor, ctx)


class FP16Compressor(CastCompressor):
    """Sends floating-point tensors as float16: half the bytes, 11 bits of precision, at most 65504."""

    wire_dtype = "float16"
    from_dtypes = frozenset({"float32", "float64", "bfloat16"})


class BF16Compressor(CastCompressor):
    """Sends floating-point tensors as bfloat16: half the bytes, 8 bits of precision, float32's range."""

    wire_dtype = "bfloat16"
    from_dtypes = frozenset({"float32", "float64", "float16"})


class Compression:
    """The built-in compressors; pass one as ``compression=hvd.Compression.fp16``."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor
    bf16: ClassVar[type[Compressor]] = BF16Compressor


class BucketCompressor:
    """Base of compressors that work on whole buckets of gradients and keep a state for each bucket.

    A subclass defines ``name``, ``compress`` and ``decompress``. Compressed tensors are reduced like gradients, so
    they must have the same shape, dtype and meaning on all ranks. Each rank has its own states, and saves them itself.
    Make one object for each optimizer.

    A collective inside ``compress`` needs a name that begins with ``self.bucket``, because ranks may compress their
    buckets in different orders. If the orders do differ, a blocking collective raises DeadlockError.

    Attributes:
        bucket: name of the bucket that is being compressed or decompressed; the same on all ranks.
    """

    bucket: str = ""

    #: Saved in ``state_dict()``, so that no other compressor loads this state.
    name: ClassVar[str] = ""

    #: ``init_count()`` and ``join_count()`` at the last step; None while no step has used the states.
    _age: tuple[int, int] | None = None

    def compress(self, tensor: Any, state: dict[str, Any]) -> tuple[Any, Any]:
        """Return the tensor to send for a bucket, and a context for ``decompress``.

        Args:
            tensor: the gradients of the bucket, flat, with zeros between them; read only.
            state: state of this bucket; empty in its first step. Store values for the next step here.
        """
        raise NotImplementedError

    def decompress(self, tensor: Any, ctx: Any, state: dict[str, Any]) -> Any:
        """Return the reduced gradients of the bucket, flat, from the reduced tensor."""
        raise NotImplementedError

    def send(self, bucket: str, tensor: Any, state: dict[str, Any]) -> tuple[Any, Any]:
        """Call ``compress`` for a bucket.

        Raises:
            RequestError: ``compress`` used an unnamed collective, or did not return a pair.
        """
        self.bucket = bucket
        with named_only(
            f"Ranks may call compress() of the compressor {self.name!r} for their buckets in different orders; "
            'pass a name for each bucket: name=f"{self.bucket}.norm"'
        ):
            return _pair(self, tensor, self.compress(tensor, state))

    def receive(self, bucket: str, tensor: Any, ctx: Any, state: dict[str, Any], count: int) -> Any:
        """Call ``decompress`` for a bucket of ``count`` elements.

        Raises:
            RequestError: ``decompress`` did not return a tensor of ``count`` elements.
        """
        self.bucket = bucket
        found = self.decompress(tensor, ctx, state)
        shape = getattr(found, "shape", None)
        if shape is None or tuple(shape) != (count,):
            received = type(found).__name__ if shape is None else f"shape {list(shape)}"
            raise wrong_argument(
                f"decompress() of the compressor {self.name!r} must return a tensor of shape [{count}]. "
                f"Received: {received}"
            )
        return found

    def claim(self, owner: object) -> None:
        """Note which optimizer uses this object.

        Raises:
            RequestError: another optimizer uses it too; the states of their buckets would get mixed up.
        """
        other = self.__dict__.get("_owner", lambda: None)()
        if other not in (None, owner):
            raise wrong_argument(f"the compressor {self.name!r} is used by another optimizer; make one object for each")
        self.__dict__["_owner"] = weakref.ref(owner)

    def state_of(self, bucket: str, places: int) -> dict[str, Any]:
        """Return the state of a bucket; an empty state if the stored one belongs to other gradients. ``places`` is the
        checksum of their names and positions in the bucket.

        States must mean the same on all ranks. So all are empty after a change of the membership, as new ranks have
        none, and after ``join()``, as some ranks have taken fewer steps; unless states were loaded since.
        """
        age = context.init_count(), context.join_count()
        if self._age not in (None, age):
            if self._buckets:
                logger.warning(
                    "compressor %s starts anew: ranks may have taken fewer steps, after a change of the membership or "
                    "join(). An elastic state that has it as an attribute keeps the states of rank 0",
                    self.name,
                )
            self._buckets.clear()
        self._age = age
        known, state = self._buckets.get(bucket, (places, {}))
        if known != places:
            logger.warning(
                "compressor %s starts anew for %s: the gradients in it, or their places, are not those of its state",
                self.name, bucket,
            )  # fmt: skip
            state = {}
        self._buckets[bucket] = places, state
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all buckets of this rank, to be saved together with the optimizer's state."""
        return {"name": self.name, "buckets": dict(self._buckets)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states; call it between steps.

        Args:
            state_dict: result of ``state_dict()`` on this rank.

        Raises:
            RequestError: the state belongs to another compressor.
        """
        if state_dict.get("name") != self.name:
            raise wrong_argument(f"this state is of the compressor {state_dict.get('name')!r}, not of {self.name!r}")
        self._buckets.clear()
        self._age = None
        for bucket, (places, state) in state_dict["buckets"].items():
            self._buckets[bucket] = places, dict(state)

    @property
    def _buckets(self) -> dict[str, tuple[int, dict[str, Any]]]:
        # A subclass need not call __init__.
        found: dict[str, tuple[int, dict[str, Any]]] = self.__dict__.setdefault("_states", {})
        return found


def check_compression(compression: Any, buckets: bool = False) -> None:
    """Raise RequestError unless ``compression`` is a compressor."""
    if isinstance(compression, type) and issubclass(compression, BucketCompressor):
        name = compression.__name__
        raise wrong_argument(f"compression is the class {name}, which keeps a state; pass an object: {name}()")
    if isinstance(compression, BucketCompressor) and not buckets:
        raise wrong_argument(
            f"the compressor {compression.name!r} keeps a state for each bucket of gradients, which only "
            "horovod.torch.DistributedOptimizer has, with op other than Adasum and without host_optimizer"
        )
    own = getattr(compression, "compress", None), getattr(compression, "decompress", None)
    if None in own or own[0] is Compressor.compress or own[1] is Compressor.decompress:
        raise wrong_argument(
            "compression must have compress() and decompress(), such as hvd.Compression.fp16. "
            f"Received: {compression!r}"
        )


def compress(compression: Any, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tensors to send, and the contexts for ``decompress``."""
    check_compression(compression)
    pairs = [_pair(compression, tensor, compression.compress(tensor)) for tensor in tensors]
    return [wire for wire, _ in pairs], [context for _, context in pairs]


def decompress(compression: Any, wires: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    """Undo ``compress``."""
    return [compression.decompress(wire, context) for wire, context in zip(wires, contexts, strict=True)]


def _pair(compression: Any, tensor: Any, found: Any) -> tuple[Any, Any]:
    """Return the result of a compressor's ``compress`` if it is a pair that begins with a tensor; else raise."""
    if isinstance(found, tuple) and len(found) == 2 and (hasattr(found[0], "dtype") or found[0] is tensor):
        return found  # without a dtype, it is the caller's own wrong argument, which the collective names
    name = getattr(compression, "name", "") or getattr(compression, "__name__", type(compression).__name__)
    received = (
        f"({', '.join(type(part).__name__ for part in found)})" if isinstance(found, tuple) else type(found).__name__
    )
    raise wrong_argument(f"compress() of the compressor {name!r} must return (tensor, ctx). Received: {received}")
