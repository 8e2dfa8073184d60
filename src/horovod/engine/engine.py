"""One per process: hands this rank's requests to the coordinator and runs the log in order.

``LogRunner`` executes the log, ``Stepper`` says what making progress consists of, ``Progress`` decides which thread
does it and when; this module is what the bindings see of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from horovod import errors
from horovod.config import Config
from horovod.core.requests import NO_NOTE, Kind, ReduceOp, Request
from horovod.engine import callsite
from horovod.engine.handles import Allocator, Handle, Passage
from horovod.engine.log import LogRunner
from horovod.engine.ports import SILENT, Link, Observer
from horovod.engine.progress import Progress
from horovod.engine.records import ENDED, WAITED, new_ring, now
from horovod.engine.signatures import SignatureTable
from horovod.engine.stats import Stats
from horovod.engine.stepper import Stepper
from horovod.transports.kernels import Buffer

__all__ = ["Engine"]

_LOCK_S = 0.1
_JOIN_S = 3.0


class Engine:
    """See the module.

    Args:
        link: this rank's connections.
        config: the settings.
        observer: is told what happens.

    Attributes:
        rank: this rank.
        size: number of ranks.
        sets: the process sets.
        transport: moves the bytes.
        peers: the other ranks; None for one rank alone.
        ring: the records of this rank's operations.
    """

    def __init__(self, link: Link, config: Config, observer: Observer = SILENT) -> None:
        self.link = link
        self.rank = rank = link.rank
        self.size = link.generation.size
        self.sets = sets = link.generation.sets
        self.transport = transport = link.transport
        self.peers = link.peers
        self._observer = observer
        self._channel = channel = link.channel
        # One table serves both: at home the coordinator changes it, elsewhere the log does.
        self._is_home = link.coordinator is not None
        self._log = LogRunner(rank, channel, transport, sets, owns_sets=not self._is_home)
        self._signatures = SignatureTable(channel, max(1, config.cache_capacity), rank, sets, transport)
        self._log.count = self._signatures.count
        self._submit_lock = threading.Lock()
        self.ring = new_ring()
        self._waits = self._wait_ns = 0
        self._born_ns = now()
        self._stepper = Stepper(link, self._log, self.ring, observer)
        self._progress = Progress(self._stepper, channel, link.doorbell)
        observer.begin(self)

    def start(self) -> None:
        """Say that this rank is here, and start the background thread."""
        if self.peers is not None:
            self.peers.enter()
        self.transport.background = self._progress.start()
        self._observer.start()

    @property
    def failure(self) -> errors.HorovodInternalError | None:
        """Why this rank takes part no more, or None."""
        return self._stepper.failure

    @property
    def culprit(self) -> int:
        """The rank because of which something failed here, or -1."""
        return self._stepper.culprit

    @property
    def position(self) -> int:
        """How many entries of the log this rank has executed or skipped, the present one included."""
        return self._log.sequence

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""
        return self._log.in_flight()

    def count(self, request: Request) -> tuple[int, int]:
        """Return how often this rank has submitted an operation of this name, and how many in all."""
        return self._signatures.count(request)

    def submit(
        self,
        allocator: Allocator,
        kind: Kind,
        name: str | None,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: tuple[int, ...] = (),
        process_set: int = 0,
        ranks: tuple[int, ...] = (),
        device: str = "cpu",
        passage: Passage | None = None,
        depth: int = 1,
        kick: bool = True,
    ) -> Handle:
        """Submit one request.

        Args:
            allocator: the framework's adapter.
            kind: which collective.
            name: the key of the match; None for the order of submission.
            inputs: contiguous buffers, read until the handle is done.
            outputs: buffers to write, which may be the inputs; None to allocate.
            op, prescale, postscale: for reductions.
            root: global rank of a broadcast's root.
            splits: rows for each member of an alltoall.
            process_set: id of the process set.
            ranks: members of a process set to add.
            device: where the caller's tensors live.
            passage: brings them to ``inputs`` and ``outputs`` back, if that is not the host.
            depth: frames between the caller and code that may be the user's.
            kick: wake the background thread; False when the caller is about to wait.

        Returns:
            A handle for ``wait`` and ``poll``.

        Raises:
            DuplicateNameError: a tensor of this name is in flight.
            HorovodInternalError: the job has failed or ended.
        """
        if self._stepper.failure is not None:
            raise self._stepper.error()
        frame = callsite.user_frame(depth)
        with self._submit_lock:
            signature = self._signatures.get(
                allocator,
                frame,
                kind,
                name,
                inputs,
                outputs,
                op,
                prescale,
                postscale,
                root,
                splits,
                process_set,
                ranks,
                device,
            )
            record = [signature.request, now(), 0, 0, 0, 0, 0, None]
            handle = Handle(allocator.kernels, inputs, () if outputs is None else outputs, allocator=allocator,
                            signature=signature, record=record, passage=passage)  # fmt: skip
            self._log.register(handle)
            inline = signature.inline
            try:
                note = self.transport.offer(handle, inline) if inline is not None else NO_NOTE
            except BaseException:
                self._log.withdraw(handle)
                raise
            signature.in_flight += 1
            signature.uses += 1
            self.ring.append(record)
            self._channel.submit(signature.id, note, patient=not kick)
        # A rank that is not at home has rung for the coordinator already; its own thread must look after the others.
        if kick and (self._is_home or self._progress.dozes):
            self._progress.kick()
        return handle

    def wait(self, handle: Handle) -> Sequence[Buffer]:
        """Block until a handle is done; make progress meanwhile.

        Returns:
            The output buffers.

        Raises:
            HorovodInternalError: what went wrong, see ``horovod.errors``.
        """
        if not handle.done:
            began = handle.record[WAITED] = now()
            try:
                self._progress.wait(handle)
            finally:
                self._waits += 1
                self._wait_ns += max(handle.record[ENDED] - began, 0)
        if handle.error is not None:
            raise handle.error
        return handle.outputs

    def linger(self, handle: Handle) -> bool:
        """Make progress for as long as that needs no sleep, after a submission with ``kick=False``.

        Returns:
            Whether the handle is done; if not, the background thread goes on with it.
        """
        if not handle.done:
            self._progress.linger(handle)
        return handle.done

    def poll(self, handle: Handle) -> bool:
        """Return whether a handle is done; never blocks.

        One rank alone then does what is left, so that the next look finds it done: names that are in
        flight, and ``poll`` itself, behave as in a job of several ranks.
        """
        done = handle.done
        if not done:
            self._progress.look()
        return done

    def stats(self) -> Stats:
        """Return what this rank has done."""
        usage = self._signatures.usage()
        return Stats(
            elapsed_s=(now() - self._born_ns) / 1e9,
            operations=sum(of_kind.operations for of_kind in usage.values()),
            bytes=sum(of_kind.bytes for of_kind in usage.values()),
            in_flight=len(self._log.in_flight()),
            kinds={kind.name.lower(): of_kind for kind, of_kind in sorted(usage.items())},
            fused=self._log.fused,
            fusions=self._log.fusions,
            waits=self._waits,
            wait_s=self._wait_ns / 1e9,
        )

    def stop(self, reason: str) -> None:
        """Leave the job: what is in flight here is abandoned, who waits for this rank gets ``reason``."""
        stepper, progress, link = self._stepper, self._progress, self.link
        self._observer.stop()
        with self._submit_lock:
            if stepper.failure is None:
                self._leave(reason)
                stepper.leave(reason)
        # If the thread waits for a peer that does not go on, then in an operation that is abandoned now. It
        # keeps the memory that it needs until the process ends.
        if not progress.stop(_JOIN_S) or not progress.exclusively(_JOIN_S):
            return
        try:
            stepper.end()
            self._observer.close()
            if link.board is not None:
                link.board.close()
            self.transport.close()
        finally:
            progress.release()
        if self.peers is not None:
            self.peers.close()

    def _leave(self, reason: str) -> None:
        if not self._is_home:
            self._channel.leave(reason)
        elif self._progress.exclusively(_LOCK_S):
            # Who waits for this rank gets the reason through the log, before the coordinator is gone.
            try:
                self._stepper.step()
                self._channel.leave(reason)
                self._stepper.step()
            finally:
                self._progress.release()
