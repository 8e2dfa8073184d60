"""The engine of a process: hands this rank's requests to the coordinator and runs the log in order.

``state`` decides, ``execution`` carries the decisions out, ``loop`` chooses the thread; this module is the interface
for the bindings. Any thread and any signal handler may call it, and may be interrupted anywhere in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FrameType

from horovod import errors
from horovod.config import Config
from horovod.core.requests import Request
from horovod.engine import callsite
from horovod.engine.calls import Call, naming
from horovod.engine.execution import Execution
from horovod.engine.handles import Allocator, Handle, Transfer
from horovod.engine.link import Link
from horovod.engine.loop import Loop
from horovod.engine.ports import SILENT, Observer
from horovod.engine.request_cache import RequestCache
from horovod.engine.state import LEFT
from horovod.engine.stats import Stats
from horovod.engine.times import ENDED, SUBMITTED, WAITED, now
from horovod.transports.kernels import Buffer

__all__ = ["Engine"]

_STOP_S, _STUCK_S = 1.0, 2.0


class Engine:
    """See the module.

    Attributes:
        rank: this rank.
        size: number of ranks.
        sets: the process sets.
        transport: moves the bytes.
        peers: the other ranks; None for one rank alone.
        ring: the records of this rank's operations.
        past: its statistics of the earlier generations of an elastic job; None in the first.
    """

    past: Stats | None = None

    def __init__(self, link: Link, config: Config, observer: Observer = SILENT) -> None:
        self.link = link
        self.rank = rank = link.rank
        self.size = link.generation.size
        self.sets = sets = link.generation.sets
        self.transport = transport = link.transport
        self.peers = link.peers
        self._observer = observer
        self._requests = RequestCache(link.channel, max(1, config.cache_capacity), rank, sets, transport)
        self._execution = Execution(link, self._requests, observer)
        self._state = self._execution.state
        self.ring = self._state.ring
        self._waits = self._wait_ns = 0
        self._born_ns = now()
        self._loop = Loop(self._execution, link)
        observer.begin(self)

    def start(self) -> None:
        """Announce this rank to its peers, and start the engine's thread."""
        if self.peers is not None:
            self.peers.enter()
        self._loop.start()
        self._observer.start()

    @property
    def failure(self) -> errors.HorovodInternalError | None:
        """The error that ended this rank's participation, or None."""
        return self._state.failure

    @property
    def culprit(self) -> int:
        """The rank that caused a failure here, or -1."""
        return self._execution.culprit

    @property
    def position(self) -> int:
        """How many entries of the log this rank has executed or skipped, the present one included."""
        return self._state.sequence

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""
        return self._state.in_flight()

    def waits(self) -> dict[int, Handle]:
        """Return the handle that each thread waits for, by thread identifier; the latest wait may be missing."""
        waits = list(self._state.waits.values())
        return {wait.thread: wait.handle for wait in waits if not wait.handle.done}

    def count(self, request: Request) -> tuple[int, int]:
        """Return how often this rank has submitted an operation of this name, and how many in all."""
        return self._requests.count(request)

    def check(self, request: Request) -> str:
        """Return why this rank may not submit a request, or an empty string."""
        return self._requests.check(request)

    def submit(
        self,
        call: Call,
        allocator: Allocator,
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] | None = None,
        transfer: Transfer | None = None,
        patient: bool = False,
    ) -> Handle:
        """Submit one request.

        Args:
            call: the operation, without tensors.
            allocator: the framework's adapter.
            inputs: contiguous buffers, read until the handle is done.
            outputs: buffers to write, which may be the inputs; None to allocate.
            transfer: copies tensors of a device to ``inputs``, and ``outputs`` back to the device.
            patient: whether the caller is about to wait.

        Returns:
            A handle for ``wait`` and ``poll``.

        Raises:
            DuplicateNameError: a tensor of this name is in flight.
            RequestError: the request is wrong by itself.
            HorovodInternalError: the job has failed or ended.

        After an exception from elsewhere, as from a signal handler, the request is in flight or withdrawn.
        """
        handle = self._describe(call, allocator, inputs, outputs, transfer, callsite.user_frame())
        self._loop.submit(handle, patient)
        return handle

    def run(
        self,
        call: Call,
        allocator: Allocator,
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] | None = None,
        transfer: Transfer | None = None,
        limit_s: float = math.inf,
    ) -> Handle:
        """Submit one request and block until it is done; see ``submit`` and ``wait``.

        An operation that takes longer than ``limit_s`` goes on in the background; then the handle is not done.
        """
        handle = self._describe(call, allocator, inputs, outputs, transfer, callsite.user_frame())
        times = handle.times
        began = times[WAITED] = times[SUBMITTED]
        self._waits += 1
        self._loop.run(handle, limit_s)
        if times[ENDED]:
            self._wait_ns += times[ENDED] - began
        if handle.error is not None:
            raise handle.error
        return handle

    def _describe(
        self,
        call: Call,
        allocator: Allocator,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer] | None,
        transfer: Transfer | None,
        frame: FrameType,
    ) -> Handle:
        submitted = now()
        if self._state.failure is not None:
            raise self._state.error()
        if not call.name and naming.advice:
            raise errors.RequestError(f"{call.kind.name.lower()} has no name. {naming.advice}")
        cached = self._requests.get(call, allocator, inputs, outputs, frame)
        return Handle(
            allocator.kernels, inputs, () if outputs is None else outputs, allocator=allocator, cached=cached,
            times=[cached.request, submitted, 0, 0, 0, 0, 0, None], transfer=transfer,
        )  # fmt: skip

    def wait(self, handle: Handle) -> Sequence[Buffer]:
        """Block until a handle is done, and return the output buffers; may be repeated if that was interrupted.

        Raises:
            HorovodInternalError: the operation or the job has failed, see ``horovod.errors``.
        """
        if not handle.done:
            times = handle.times
            began = times[WAITED] = now()
            self._waits += 1
            self._loop.wait(handle)
            self._wait_ns += max(0, times[ENDED] - began)
        if handle.error is not None:
            raise handle.error
        return handle.outputs

    def pause(self, act: Callable[[], None]) -> None:
        """Call ``act`` while no operation is being executed, so that it may change data of operations in flight."""
        self._loop.pause(act)

    def poll(self, handle: Handle) -> bool:
        """Return whether a handle is done; never blocks. The engine looks for news, which the next call finds."""
        done = handle.done
        if not done:
            self._loop.look()
        return done

    def stats(self) -> Stats:
        """Return the statistics of this rank over all generations."""
        usage = self._requests.usage(list(self._state.inbox))
        own = Stats(
            elapsed_s=(now() - self._born_ns) / 1e9,
            operations=sum(of_kind.operations for of_kind in usage.values()),
            bytes=sum(of_kind.bytes for of_kind in usage.values()),
            in_flight=len(self._state.in_flight()),
            kinds={kind.name.lower(): of_kind for kind, of_kind in sorted(usage.items())},
            fused=self._state.fused,
            fusions=self._state.fusions,
            waits=self._waits,
            wait_s=self._wait_ns / 1e9,
        )
        return own if self.past is None else own.after(self.past)

    def abort(self, error: errors.HorovodInternalError) -> None:
        """Fail this rank: every wait of every thread ends with ``error``, also in the middle of an operation.

        The other ranks learn that this one has failed. Does not block; ``stop`` releases the resources.
        """
        self._loop.abort(error)

    def stop(self, reason: str) -> None:
        """Leave the job: abandon operations in flight here; ranks that wait for this one get ``reason``.

        May be called again, and by several threads.
        """
        self._observer.stop()
        if not self._loop.stop(reason, _STOP_S):
            # The thread is in the middle of an operation, and waits for a peer that does not go on.
            self._execution.announce(reason)
            self._loop.abort(errors.NotInitializedError(LEFT))
            self._loop.stop(reason, _STUCK_S)
