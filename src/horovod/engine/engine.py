"""One per process: hands this rank's requests to the coordinator and runs the log in order.

``LogRunner`` executes the log, ``Progress`` decides which thread does it and when; this module holds them
together and knows what to do when the job falls apart.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from horovod import errors
from horovod.config import Config
from horovod.core.coordinator import Coordinator
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import NO_TOKEN, Kind, ReduceOp
from horovod.engine import callsite
from horovod.engine.channel import Channel, CoordinatorChannel, WorkerChannel
from horovod.engine.handles import Allocator, Handle, Passage
from horovod.engine.log import LogRunner
from horovod.engine.progress import Progress
from horovod.engine.records import ENDED, SUBMITTED, WAITED, new_ring, now
from horovod.engine.signatures import SignatureTable
from horovod.engine.stats import Stats
from horovod.engine.vigil import Vigil
from horovod.links.shm.board import Board
from horovod.links.shm.peers import Peers
from horovod.observe.observer import Observer
from horovod.transports.base import Transport
from horovod.transports.kernels import Buffer
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.control import Control, State

__all__ = ["Engine"]

_LOCK_S = 0.1
_JOIN_S = 3.0


class Engine:
    """See the module.

    Args:
        rank: this rank.
        size: number of ranks.
        config: the settings.
        transport: moves the bytes.
        control: the control page; None for one rank alone.
        peers: the other ranks; None for one rank alone.
        arena: this rank's arena; None where there is none.
        board: what ranks ask and tell each other; None for one rank alone.
        job: name of the job.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        config: Config,
        transport: Transport,
        control: Control | None = None,
        peers: Peers | None = None,
        arena: Arena | None = None,
        board: Board | None = None,
        job: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.config = config
        self.transport = transport
        self.control = control
        self.peers = peers
        self.arena = arena
        self.sets = ProcessSetTable(size)
        self.failure: errors.HorovodInternalError | None = None
        self._coordinator: Coordinator | None = None
        channel: Channel
        if rank == 0:
            # One table serves both: on rank 0 the coordinator changes it, elsewhere the log does.
            self._coordinator = Coordinator(size, config.fusion_threshold_bytes, max(1, config.cache_capacity))
            self.sets = self._coordinator.sets
            channel = CoordinatorChannel(self._coordinator, control)
        else:
            assert control is not None
            channel = WorkerChannel(control)
        self._channel = channel
        self._log = LogRunner(rank, channel, transport, self.sets, owns_sets=rank != 0)
        self._signatures = SignatureTable(channel, max(1, config.cache_capacity), rank, self.sets, transport)
        self._submit_lock = threading.Lock()
        self.ring = new_ring()
        self._waits = self._wait_ns = 0
        self._born_ns = now()
        self.observer = Observer(
            config, job, rank, size, self.ring, self._log, self.sets, self._coordinator, peers, board,
            lambda: self.failure,
        )  # fmt: skip
        self._vigil: Vigil | None = None
        if control is not None and peers is not None:
            self._vigil = Vigil(rank, control, peers, self._log, channel, self.observer)
        self.attend = self.observer.attend
        #: Whether ``step`` has something to do; spun on, so without a detour.
        self.has_news = self._log.has_news
        self.goal = self._log.goal
        self._progress = Progress(self, channel, control)

    def start(self) -> None:
        """Say that this rank is here, and start the background thread."""
        if self.control is not None:
            self.control.set_state(State.RUNNING)
        self.transport.background = self._progress.start()
        self.observer.start()

    @property
    def culprit(self) -> int:
        """The rank because of which something failed here, or -1."""
        if isinstance(self.failure, errors.PeerLostError):
            return self.failure.rank
        return self._log.culprit

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
        if self.failure is not None:
            raise self._failed()
        frame = callsite.user_frame(depth)
        with self._submit_lock:
            signature = self._signatures.get(
                allocator,
                self.arena,
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
            rider = signature.rider
            try:
                token = self.transport.offer(handle, rider) if rider is not None else NO_TOKEN
            except BaseException:
                self._log.withdraw(handle)
                raise
            signature.in_flight += 1
            signature.uses += 1
            self.ring.append(record)
            self._channel.submit(signature.id, token, patient=not kick)
        # A rank other than 0 has rung for the coordinator already.
        if kick and self.rank == 0:
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

    def step(self) -> None:
        """Execute what the log holds; see ``Stepper``."""
        if self.failure is None:
            self._log.step()
        else:
            self._log.fail_all(self._failed)

    def watch(self, rank: int, waited_s: float) -> None:
        """Raise when waiting for ``rank`` in the middle of an operation is pointless; see ``Watch``."""
        assert self._vigil is not None
        self._vigil.watch(rank, waited_s)

    def tick(self, waited_s: float) -> None:
        """Look after the other ranks; see ``Stepper``."""
        if self._vigil is not None and self.failure is None:
            self._vigil.tick(waited_s)

    def is_idle(self) -> bool:
        """Whether nothing is in flight, here or, on rank 0, anywhere; and nobody is asked about a stall."""
        if not self._log.is_idle() or self.observer.is_busy:
            return False
        return self._coordinator is None or not self._coordinator.is_waiting

    def quiet_s(self) -> float:
        """Return how long ago the caller has submitted what it does not wait for."""
        last = self.ring[-1] if self.ring else None
        return math.inf if last is None or last[WAITED] else (now() - last[SUBMITTED]) / 1e9

    def abandon(self, error: BaseException) -> None:
        """End the engine: this rank cannot keep in step with the log any more."""
        if isinstance(error, errors.HorovodInternalError):
            self._fail(error)
        else:
            self._fail(errors.HorovodInternalError(f"this rank's engine was interrupted: {error!r}"))

    def _fail(self, failure: errors.HorovodInternalError) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self.observer.failed(failure)
        if self.control is not None:
            self.control.set_state(State.FAILED, self.culprit)
        self._log.fail_all(self._failed)

    def _failed(self) -> errors.HorovodInternalError:
        failure = self.failure
        assert failure is not None
        if isinstance(failure, errors.PeerLostError):
            return errors.PeerLostError(str(failure), rank=failure.rank, pid=failure.pid)
        return type(failure)(str(failure))

    def stop(self, reason: str) -> None:
        """Leave the job: what is in flight here is abandoned, who waits for this rank gets ``reason``."""
        self.observer.stop()
        with self._submit_lock:
            if self.failure is None:
                self._leave(reason)
                self.observer.left(reason)
                if self.control is not None:
                    self.control.set_state(State.LEFT, self.culprit)
        # If the thread waits for a peer that does not go on, then in an operation that is abandoned now. It
        # keeps the memory that it needs until the process ends.
        if not self._progress.stop(_JOIN_S) or not self._progress.exclusively(_JOIN_S):
            return
        try:
            if self.failure is None:
                self.failure = errors.NotInitializedError("hvd.shutdown() was called")
            self._log.fail_all(self._failed)
            self.observer.close()
            self.transport.close()
        finally:
            self._progress.release()
        if self.peers is not None:
            self.peers.close()

    def _leave(self, reason: str) -> None:
        if self._coordinator is None:
            self._channel.leave(reason)
        elif self._progress.exclusively(_LOCK_S):
            # Who waits for rank 0 gets the reason through the log, before rank 0 is gone.
            try:
                self.step()
                self._channel.leave(reason)
                self.step()
            finally:
                self._progress.release()
