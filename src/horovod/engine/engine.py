"""One per process: hands this rank's requests to the coordinator and runs the log in order.

Progress is made under one lock, by whoever has reason to: a thread that waits for a result does the work
itself (handing a small operation to another thread and back costs more than the operation), and a background
thread does it while the caller is away, so that communication overlaps with computing. The background thread
sleeps in the kernel unless somebody rings; it never spins.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Sequence

from horovod import errors
from horovod.config import Config
from horovod.core.coordinator import Coordinator, Declared, Run
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import NO_TOKEN, Kind, ReduceOp, Response
from horovod.engine import callsite
from horovod.engine.channel import Channel, CoordinatorChannel, WorkerChannel
from horovod.engine.handles import Allocator, Handle, Passage
from horovod.engine.signatures import SignatureTable
from horovod.engine.stalls import StallWatch
from horovod.engine.watch import Peers
from horovod.transports.base import Entry, Transport
from horovod.transports.kernels import Buffer
from horovod.transports.shm import futex
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.control import HOLDER, PARKED, Control, State

__all__ = ["Engine"]

_SLICE_S = 0.1
_BEHIND_SLICE_S = 0.001
_IDLE_SLICE_S = 1.0
_JOIN_S = 3.0
_SPINS = 400


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
        self.culprit = -1
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
        self._stalls = StallWatch(config, rank, peers)
        self._signatures = SignatureTable(channel, max(1, config.cache_capacity), rank, self.sets)
        self._entries: dict[int, Entry] = {}
        self._named: dict[tuple[int, str], Handle] = {}
        self._unnamed: dict[int, collections.deque[Handle]] = {}
        self._sequence = 0
        self._lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._waiters: collections.deque[threading.Lock] = collections.deque()
        self._stopping = False
        crowded = size > len(os.sched_getaffinity(0))
        self._spins = 0 if crowded or size == 1 else _SPINS
        self._thread: threading.Thread | None = None
        if control is not None:
            self._thread = threading.Thread(target=self._background, name="horovod-engine", daemon=True)

    def start(self) -> None:
        """Say that this rank is here, and start the background thread."""
        if self.control is not None and self._thread is not None:
            self.control.set_state(State.RUNNING)
            self._thread.start()

    # -- submitting ----------------------------------------------------------------------------------------------

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
            handle = Handle(allocator, signature, inputs, outputs)
            handle.passage = passage
            if name:
                key = (process_set, name)
                if key in self._named:
                    other = self._named[key].signature.request.site
                    raise errors.DuplicateNameError(
                        f"a tensor named {name!r} is still in flight, submitted at {other}; synchronize() it first, "
                        "or give this one another name"
                    )
                self._named[key] = handle
            else:
                queue = self._unnamed.get(process_set)
                if queue is None:
                    queue = self._unnamed[process_set] = collections.deque()
                queue.append(handle)
            signature.in_flight += 1
            token = self.transport.offer(handle, signature.nbytes) if signature.may_ride else NO_TOKEN
            self._channel.submit(signature.id, token)
        if kick:
            self._kick()
        return handle

    def _kick(self) -> None:
        if self._coordinator is not None and self.control is not None:
            self.control.ring(0)
        elif self.control is None:
            # One rank alone has no background thread: what is submitted is executed at once.
            with self._lock:
                self._step()

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self, handle: Handle) -> Sequence[Buffer]:
        """Block until a handle is done; make progress meanwhile.

        Returns:
            The output buffers.

        Raises:
            HorovodInternalError: what went wrong, see ``horovod.errors``.
        """
        if not handle.done:
            if self._lock.acquire(False):
                try:
                    self._pump(handle)
                finally:
                    self._hand_over()
            else:
                self._wait_behind(handle)
        if handle.error is not None:
            raise handle.error
        return handle.outputs

    def poll(self, handle: Handle) -> bool:
        """Return whether a handle is done; never blocks."""
        return handle.done

    def _wait_behind(self, handle: Handle) -> None:
        """Wait while another thread makes the progress; take over when it stops."""
        signal = threading.Lock()
        signal.acquire()
        handle.waiter = signal
        self._waiters.append(signal)
        try:
            while not handle.done:
                if self._lock.acquire(False):
                    try:
                        self._pump(handle)
                    finally:
                        self._hand_over()
                    return
                signal.acquire(timeout=_SLICE_S)
        finally:
            self._waiters.remove(signal)

    def _hand_over(self) -> None:
        """Give up the lock; see to it that somebody goes on with what is left."""
        control = self.control
        if control is not None:
            control.words32[control.mode[self.rank]] = PARKED
            futex.fence()
        self._lock.release()
        for signal in list(self._waiters):
            if signal.locked():
                signal.release()
                return
        if control is not None and self._channel.has_news():
            control.ring(self.rank)

    def _pump(self, handle: Handle) -> None:
        """Make progress until a handle is done; called with the lock held."""
        control, channel = self.control, self._channel
        if control is None:
            self._step()
            if not handle.done:
                self._fail(errors.StallError("a world of one rank waits for itself; this is a bug in horovod"))
            return
        words, mode, bell = control.words32, control.mode[self.rank], control.bell[self.rank]
        words[mode] = 0
        started = 0.0
        has_news, spins = channel.has_news, self._spins
        try:
            while True:
                self._step()
                if handle.done:
                    return
                for _ in range(spins):
                    if has_news():
                        break
                else:
                    seen = words[bell]
                    words[mode] = HOLDER
                    futex.fence()
                    if not has_news():
                        woken = control.sleep(seen, _BEHIND_SLICE_S if channel.is_behind() else _SLICE_S, HOLDER)
                        if not woken:
                            started = started or time.monotonic() - _SLICE_S
                            self._tick(time.monotonic() - started)
                    words[mode] = 0
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            words[mode] = 0

    # -- the log -------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Execute what the log holds; called with the lock held."""
        if self.failure is not None:
            return False
        channel, progressed = self._channel, False
        entry = channel.next()
        while entry is not None:
            progressed = True
            if isinstance(entry, Declared):
                self._entries[entry.id] = Entry(entry.response, self.rank)
            else:
                self._sequence += 1
                self._execute(entry)
            entry = channel.next()
        return progressed

    def _execute(self, run: Run) -> None:
        batch = []
        for key in run.ids:
            entry = self._entries[key]
            if entry.me >= 0:
                batch.append((entry, self._match(entry.response)))
        if not batch:
            return
        entry, handle = batch[0]
        response = entry.response
        if response.error:
            self.transport.skip(handle)
            handle.finish(self._error(response))
            return
        if response.kind >= Kind.JOIN:
            self._answer(response, handle)
            return
        try:
            if handle.passage is not None:
                handle.passage.before()
            self.transport.run(self._sequence, batch, run.tokens)
            if handle.passage is not None:
                handle.passage.after(handle.outputs)
        except BaseException:
            for _, handle in batch:
                self._forget(handle)
            raise
        if response.kind is Kind.ALLTOALL:
            handle.received_splits = _received_splits(entry)
        for _, handle in batch:
            handle.finish()

    def _match(self, response: Response) -> Handle:
        if response.name:
            return self._named.pop((response.process_set, response.name))
        return self._unnamed[response.process_set].popleft()

    def _forget(self, handle: Handle) -> None:
        """Put a handle that could not be executed back, so that it fails with all others."""
        request = handle.signature.request
        if request.name:
            self._named[(request.process_set, request.name)] = handle
        else:
            self._unnamed.setdefault(request.process_set, collections.deque()).appendleft(handle)

    def _answer(self, response: Response, handle: Handle) -> None:
        request = response.requests[0]
        handle.result = response.result
        if response.kind is Kind.ADD_PROCESS_SET and self._coordinator is None:
            self.sets.add(request.ranks)
        elif response.kind is Kind.REMOVE_PROCESS_SET and self._coordinator is None:
            self.sets.remove(request.root)
        handle.finish()

    def _error(self, response: Response) -> Exception:
        if response.error_type == "ValueError":
            return ValueError(response.error)
        if response.error_type == "PeerLostError":
            self.culprit = response.result
            pid = self.peers.pids[response.result] if self.peers is not None else 0
            return errors.PeerLostError(response.error, rank=response.result, pid=pid)
        kind: type[errors.HorovodInternalError] = getattr(errors, response.error_type)
        return kind(response.error)

    # -- failing -------------------------------------------------------------------------------------------------

    def watch(self, rank: int, waited_s: float) -> None:
        """Raise when waiting for ``rank`` in the middle of an operation is pointless; see ``Watch``."""
        peers = self.peers
        assert peers is not None
        lost = peers.gone()
        if lost is None and peers.is_dead(rank):
            lost = peers.culprit_of(rank)
        if lost is not None:
            raise errors.PeerLostError(
                f"{peers.fate(lost)}, in the middle of a collective", rank=lost, pid=peers.pids[lost]
            )
        self._stalls.check_execution(rank, waited_s)

    def _tick(self, waited_s: float) -> None:
        """Look after the others; called with the lock held, about every 100 ms of waiting."""
        peers = self.peers
        if peers is None or self.failure is not None:
            return
        lost = peers.gone()
        if lost is not None:
            raise errors.PeerLostError(self._lost_text(lost), rank=lost, pid=peers.pids[lost])
        control = self.control
        assert control is not None
        if self._coordinator is None and control.state_of(0) is State.LEFT and not self._channel.has_news():
            lost = peers.culprit_of(0)
            raise errors.PeerLostError(self._lost_text(lost), rank=lost, pid=peers.pids[lost])
        self._stalls.tick(self._coordinator, list(self._pending()), waited_s)
        if isinstance(self._channel, CoordinatorChannel):
            self._channel.publish()

    def _pending(self) -> list[Handle]:
        return [*self._named.values(), *(handle for queue in self._unnamed.values() for handle in queue)]

    def _lost_text(self, rank: int) -> str:
        assert self.peers is not None
        waiting = [handle.signature.request for handle in self._pending()]
        text = self.peers.fate(rank)
        if waiting:
            first = waiting[0]
            text += f", while rank {self.rank} waited in {first.kind.name.lower()} {first.name or '(unnamed)'!r}"
            text += f" at {first.site}"
        return text

    def _abandon(self, error: BaseException) -> None:
        """End the engine: this rank cannot keep in step with the log any more."""
        if isinstance(error, errors.HorovodInternalError):
            self._fail(error)
        else:
            self._fail(errors.HorovodInternalError(f"this rank's engine was interrupted: {error!r}"))

    def _fail(self, failure: errors.HorovodInternalError) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        if isinstance(failure, errors.PeerLostError):
            self.culprit = failure.rank
        if self.control is not None:
            self.control.set_state(State.FAILED, self.culprit)
        pending = self._pending()
        self._named.clear()
        self._unnamed.clear()
        for handle in pending:
            self.transport.skip(handle)
            handle.finish(self._failed())

    def _failed(self) -> errors.HorovodInternalError:
        failure = self.failure
        assert failure is not None
        if isinstance(failure, errors.PeerLostError):
            return errors.PeerLostError(str(failure), rank=failure.rank, pid=failure.pid)
        return type(failure)(str(failure))

    # -- the background thread -----------------------------------------------------------------------------------

    def _background(self) -> None:
        control = self.control
        assert control is not None
        words, mode, bell = control.words32, control.mode[self.rank], control.bell[self.rank]
        while not self._stopping:
            seen = words[bell]
            slice_s = _SLICE_S if self._named or self._unnamed_waiting() else _IDLE_SLICE_S
            if self._lock.acquire(False):
                try:
                    words[mode] = 0
                    if not self._waiters:
                        self._step()
                    words[mode] = PARKED
                    futex.fence()
                    seen = words[bell]
                    if self._channel.has_news() and not self._waiters and self.failure is None:
                        continue
                    if self._channel.is_behind():
                        slice_s = _BEHIND_SLICE_S
                except BaseException as error:
                    self._abandon(error)
                    words[mode] = PARKED
                finally:
                    self._release_to_waiter()
            if not control.sleep(seen, slice_s, PARKED) and self._lock.acquire(False):
                try:
                    self._tick(slice_s)
                except errors.HorovodInternalError as error:
                    self._fail(error)
                finally:
                    words[mode] = PARKED
                    self._release_to_waiter()

    def _unnamed_waiting(self) -> bool:
        return any(self._unnamed.values())

    def _release_to_waiter(self) -> None:
        self._lock.release()
        for signal in list(self._waiters):
            if signal.locked():
                signal.release()
                return

    # -- ending --------------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        if self._coordinator is None:
            self._channel.leave(reason)
        elif self._lock.acquire(timeout=_SLICE_S):
            # Who waits for rank 0 gets the reason through the log, before rank 0 is gone.
            try:
                self._step()
                self._coordinator.leave(0, reason)
                self._step()
            finally:
                self._lock.release()

    def stop(self, reason: str) -> None:
        """Leave the job: what is in flight here is abandoned, who waits for this rank gets ``reason``."""
        with self._submit_lock:
            if self.failure is None and self.control is not None:
                self._leave(reason)
        if self.control is not None:
            if self.failure is None:
                self.control.set_state(State.LEFT, self.culprit)
            self._stopping = True
            assert self._thread is not None
            self.control.ring(self.rank)
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                # It waits for a peer that does not go on, in an operation that is abandoned now. It keeps what it
                # needs until the process ends.
                return
        with self._lock:
            if self.failure is None:
                self.failure = errors.NotInitializedError("hvd.shutdown() was called")
            for handle in self._pending():
                handle.finish(self._failed())
            self.transport.close()
        if self.peers is not None:
            self.peers.close()


def _received_splits(entry: Entry) -> tuple[int, ...]:
    response = entry.response
    parts = len(response.members)
    received = []
    for i in range(parts):
        request = response.request_of(i)
        received.append(request.splits[entry.me] if request.splits else request.tensors[0].shape[0] // parts)
    return tuple(received)
