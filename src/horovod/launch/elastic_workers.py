"""An elastic job whose processes another system starts, such as Ray or Spark.

The job service decides (``core.membership``). ``ElasticWorkers`` passes its decisions to an *adapter*, which starts
and kills processes and reports how they ended. The adapter must put the variables of ``start`` into the environment of
each process (``bindings.hosted`` does that for one call); the process then calls the user's function.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.config import ELASTIC, JOB_ID, MEETING, SECRET_KEY
from horovod.core.membership_events import (
    Assign,
    Begin,
    Decision,
    Discovered,
    Ended,
    Fence,
    Finish,
    Paused,
    Policy,
    Silent,
    Slot,
    Start,
)
from horovod.errors import LaunchError
from horovod.launch.elastic_members import ElasticMembers
from horovod.launch.ledger import signature
from horovod.launch.plan import slot_variables
from horovod.launch.workers import listen_addresses
from horovod.logs import logger
from horovod.rendezvous.service import Service

__all__ = ["ElasticWorkers", "End", "WorkerAdapter"]

#: How often the adapter may look at its system.
_LOOK_S = 0.25


class WorkerAdapter:
    """The system that runs the processes. ``ElasticWorkers.run`` calls all methods, in its thread."""

    def start(self, slot: Slot, variables: dict[str, str]) -> None:
        """Start a process in a slot, without waiting for it.

        ``ElasticWorkers.ended`` must follow for every start, also for a process that could not be started.

        Args:
            slot: the ``number``-th slot of ``host``, a host that was offered.
            variables: environment variables of the process.
        """
        raise NotImplementedError

    def kill(self, slot: Slot) -> None:
        """Kill the process in a slot, without waiting for it. ``ElasticWorkers.ended`` must follow.

        Args:
            slot: slot of a started process.
        """
        raise NotImplementedError

    def describe(self, slot: Slot) -> str:
        """Return the process in a slot in words, such as "actor 01ab on node 10.0.0.2".

        Args:
            slot: slot of a started process.
        """
        return str(slot)

    def look(self) -> None:
        """Look for changes, and report them with ``offer`` and ``ended``; called several times a second."""

    def kill_stopped(self, slot: Slot, pid: int) -> None:
        """Kill a process if a signal has stopped it; the process has been silent for some seconds.

        Args:
            slot: slot of the process.
            pid: its process id, as the process itself sees it.
        """


@dataclass(frozen=True)
class End:
    """The end of a process.

    Attributes:
        slot: its slot.
        how: how it ended, such as "died: node 10.0.0.2 is lost"; empty if its function returned.
        value: return value of the function.
        error: exception that the function raised; None if the process was lost.
        text: traceback of the error, as Python prints it.
    """

    slot: Slot
    how: str = ""
    value: Any = None
    error: BaseException | None = None
    text: str = ""


class ElasticWorkers:
    """One elastic job.

    Args:
        adapter: starts and kills the processes.
        policy: how the members of the job may change; must be elastic.
        settings: more variables for all processes, such as HOROVOD_TIMELINE.
        interfaces: network interfaces of this host at which the processes find the job service; all when empty.
        say: takes each line about a loss or a join; a warning of the log when omitted.

    Raises:
        InitError: an interface does not exist, or has no address.
        OSError: the service cannot listen at any address.
    """

    def __init__(
        self,
        adapter: WorkerAdapter,
        policy: Policy,
        settings: Mapping[str, str] | None = None,
        interfaces: Sequence[str] = (),
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self._adapter, self._policy, self._say = adapter, policy, say
        key = secrets.token_hex(32)
        self._service = Service(bytes.fromhex(key), listen_addresses(interfaces), policy=policy)
        meeting = ",".join(self._service.endpoints)
        own = {ELASTIC: "1", JOB_ID: secrets.token_hex(16), SECRET_KEY: key, MEETING: meeting}
        self._common = {**(settings or {}), **own}
        self._members = ElasticMembers()
        self._offers: Mapping[str, int] = {}
        self._values: dict[int, Any] = {}  # by process
        self._error: BaseException | None = None  # the latest
        self._finish: Finish | None = None
        self._ends: deque[End] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of the descriptor

    def offer(self, hosts: Mapping[str, int]) -> None:
        """Set the hosts that the job may use from now on; any thread, never blocks.

        Args:
            hosts: number of slots by name of the host. Hosts that are missing are withdrawn: their processes are asked
                to leave at the next commit or step.
        """
        if dict(hosts) != self._offers:
            self._offers = dict(hosts)
            self._service.put(Discovered(self._offers))

    def ended(self, end: End) -> None:
        """Report the end of a process, once for each that was started; any thread, never blocks.

        Args:
            end: the process, and how it ended.
        """
        with self._lock:
            if self._wake >= 0:
                self._ends.append(end)
                os.eventfd_write(self._wake, 1)

    def run(self) -> list[Any]:
        """Run the job to its end, and return what the ranks of the last generation returned, in rank order.

        Raises:
            LaunchError: the job could not go on; the message names the processes that failed, and ``__cause__`` is the
                last error that a function raised.

        Blocks until the job is over; processes for which ``WorkerAdapter.kill`` was called may still run then.
        """
        poll = select.poll()
        poll.register(self._service.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while self._finish is None:
                self._adapter.look()
                poll.poll(_LOOK_S * 1000)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._obey()
                while self._ends and self._finish is None:
                    self._take_end(self._ends.popleft())
                if line := self._members.ledger.waiting(time.monotonic(), self._policy.fewest):
                    self._say(line)
        finally:
            for slot in self._members.running.keys() - {end.slot for end in self._ends}:
                self._adapter.kill(slot)
        if summary := self._members.ledger.summary(time.monotonic(), self._service.progress):
            self._say(summary)
        if self._finish.why:
            why = self._finish.why
            causes = [line for line in self._members.ledger.causes() if line.strip() not in why]
            raise LaunchError("\n".join([f"the job has ended: {why}", *causes])) from self._error
        ranks = self._members.ranks or {process: process for process in self._values}
        return [self._values[process] for process in sorted(ranks, key=ranks.__getitem__) if process in self._values]

    def close(self) -> None:
        """End the service. Blocks for two seconds at most."""
        self._service.close()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _obey(self) -> None:
        for decision in self._service.take():
            if self._finish is None:
                self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Start):
            self._start(decision.slot)
        elif isinstance(decision, Fence):
            if (process := self._members.running.get(decision.slot)) is not None:
                self._members.fenced[process] = decision.why
                self._adapter.kill(decision.slot)
        elif isinstance(decision, Silent):
            if decision.slot in self._members.running:
                self._adapter.kill_stopped(decision.slot, decision.pid)
        elif isinstance(decision, Paused):
            self._members.ledger.changing(time.monotonic())
        elif isinstance(decision, Assign):
            self._members.assigned(time.monotonic(), decision)
        elif isinstance(decision, Begin):
            self._begin(decision.generation)
        elif isinstance(decision, Finish):
            self._finish = decision

    def _start(self, slot: Slot) -> None:
        slots = min(self._offers.get(slot.host, slot.number + 1), self._policy.most)
        _, rank, size = self._members.start(slot, self._policy.size)
        self._adapter.start(slot, self._common | slot_variables(slot.host, slot.number, slots, rank, size))

    def _begin(self, generation: int) -> None:
        slots = {process: slot for slot, process in self._members.running.items()}
        progress = self._service.progress
        for line in self._members.begun(
            time.monotonic(), generation, progress, lambda process: f"({self._adapter.describe(slots[process])})"
        ):
            self._say(line)
        self._check_error()

    def _take_end(self, end: End) -> None:
        process = self._members.running.get(end.slot)
        if process is None:
            return
        self._obey()  # the ranks may have met before it ended
        who = f"{self._members.name(process)} ({self._adapter.describe(end.slot)})"
        del self._members.running[end.slot]
        has_met = self._members.ledger.generation > 0
        fenced = self._members.fenced.pop(process, "")
        how = f"was killed: {fenced}" if fenced else end.how
        if not how:
            self._values[process] = end.value
            if has_met:
                for line in self._members.left(process, who):
                    self._say(line)
                self._service.put(Ended(end.slot))
            elif not self._members.running:  # the function is not elastic, and has returned on all ranks
                self._finish = Finish("")
            return
        self._error = end.error or self._error
        error = signature(end.text.splitlines())
        for line in self._members.lost(time.monotonic(), process, who, how, 1, error):
            self._say(line)
        self._check_error()
        self._service.put(Ended(end.slot, how))
        if end.error is not None and not has_met:
            self._finish = Finish(f"{who} {how} before the ranks had met")

    def _check_error(self) -> None:
        if self._finish is None and (why := self._members.script_error()):
            self._finish = Finish(why)
