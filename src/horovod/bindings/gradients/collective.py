"""Operations that reduce a bucket: allreduce, plain or compressed, and reduce-scatter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from horovod.bindings.collectives import Collectives
from horovod.bindings.compression import BucketCompressor
from horovod.bindings.gradients.adapter import GradientAdapter
from horovod.bindings.gradients.layout import BucketLayout
from horovod.bindings.gradients.names import FLAGS, PREFIX
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.errors import HorovodInternalError

__all__ = [
    "Allreduce",
    "BucketCollective",
    "CompressedAllreduce",
    "ReduceScatter",
    "Reduced",
]


@dataclass(frozen=True)
class Reduced:
    """A bucket after its reduction."""

    flags: Any  # the presence flags, reduced
    values: Any  # the reduced elements
    start: int  # index of the first value in the bucket's buffer
    in_place: bool  # whether `values` are the bucket's own memory


class BucketCollective(Protocol):
    """Reduces buckets over the ranks of a process set.

    Attributes:
        shards: number of equal parts into which a bucket's data must be divisible.
        instead: advice for a user who changed a gradient that was being reduced.
    """

    instead: str

    @property
    def shards(self) -> int:
        """See the class."""

    def begin(self, wire: Any, layout: BucketLayout, name: str, parameters: Sequence[str]) -> Any:
        """Start to reduce a bucket, whose buffer is ``wire``, and return the operation for ``wait``. ``name`` is the
        same on all ranks; ``parameters`` are the names of those whose gradients lie in the bucket, in order.
        """

    def wait(self, pending: Any) -> Reduced:
        """Wait for the operation that ``begin`` started.

        Raises:
            HorovodInternalError: the collective failed.
        """


class Allreduce(BucketCollective):
    """Reduces a bucket in place on every rank; the flags are sent with the data."""

    shards = 1
    instead = (
        "To clip or unscale gradients, call optimizer.synchronize() first, and then optimizer.step() inside "
        "`with optimizer.skip_synchronize():`."
    )

    def __init__(self, comm: Collectives, settings: ReduceSettings) -> None:
        self._comm = comm
        self._settings = settings

    def begin(self, wire: Any, layout: BucketLayout, name: str, parameters: Sequence[str]) -> Any:
        return self._comm.allreduce_async_(wire, name=name, **self._settings.keywords), wire, layout.flags

    def wait(self, pending: Any) -> Reduced:
        handle, wire, flags = pending
        self._comm.synchronize(handle)
        return Reduced(wire[flags:], wire, 0, in_place=True)


class CompressedAllreduce(BucketCollective):
    """Reduces a bucket on every rank; a compressor makes the tensor to send. The flags are sent uncompressed."""

    shards = 1
    instead = Allreduce.instead

    def __init__(self, adapter: GradientAdapter, settings: ReduceSettings, compressor: BucketCompressor) -> None:
        self._adapter = adapter
        self._settings = settings
        self._compressor = compressor
        compressor.claim(self)

    def begin(self, wire: Any, layout: BucketLayout, name: str, parameters: Sequence[str]) -> Any:
        comm, data, flags = self._adapter.comm, wire[: layout.flags], wire[layout.flags :]
        # Leave the optimizer's number out: it may differ in the job that loads the state.
        places = zlib.crc32(repr((layout.offsets, layout.flags, *parameters)).encode(errors="surrogatepass"))
        state = self._compressor.state_of(name.removeprefix(PREFIX).partition(".")[2], places)
        with self._adapter.quietly():
            sent, ctx = self._compressor.send(name, data, state)
        # Not in place: ``sent`` may be part of the compressor's state.
        handle = comm.allreduce_async(sent, name=name, **self._settings.keywords)
        flags_handle = comm.allreduce_async_(flags, name=f"{name}{FLAGS}", **self._settings.keywords)
        return handle, flags_handle, name, ctx, state, wire, layout.flags

    def wait(self, pending: Any) -> Reduced:
        handle, flags_handle, name, ctx, state, wire, count = pending
        comm = self._adapter.comm
        reduced = comm.synchronize(handle)
        comm.synchronize(flags_handle)
        self._adapter.copy(wire[:count], self._compressor.receive(name, reduced, ctx, state, count))
        return Reduced(wire[count:], wire, 0, in_place=True)


class ReduceScatter(BucketCollective):
    """Gives each rank its shard of the data and all flags, for an optimizer that updates only its shard."""

    instead = "No rank has all of it: to clip, call optimizer.clip_grad_norm_(max_norm) before optimizer.step()."

    def __init__(self, comm: Collectives, settings: ReduceSettings) -> None:
        self._comm = comm
        self._settings = settings

    @property
    def shards(self) -> int:
        """One shard for each rank."""
        return self._settings.process_set.size() or 1

    def begin(self, wire: Any, layout: BucketLayout, name: str, parameters: Sequence[str]) -> Any:
        data, flags = wire[: layout.flags], wire[layout.flags :]
        handle = self._comm.reducescatter_async(data, name=name, **self._settings.keywords)
        flags_handle = self._comm.allreduce_async_(flags, name=f"{name}{FLAGS}", **self._settings.keywords)
        return handle, flags_handle, flags, layout.flags

    def wait(self, pending: Any) -> Reduced:
        handle, flags_handle, flags, count = pending
        values = self._comm.synchronize(handle)
        self._comm.synchronize(flags_handle)
        share = count // self.shards
        if len(values) != share:
            raise HorovodInternalError(
                f"a shard of a bucket has {share} elements, received {len(values)}: a rank has joined meanwhile, which "
                "a sharded optimizer cannot follow; call hvd.join() after its last step only"
            )
        return Reduced(flags, values, share * (self._settings.process_set.rank() or 0), in_place=False)
