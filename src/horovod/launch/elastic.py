"""Runs an elastic job: carries out the membership's decisions, and reports to it changes of hosts and ranks.

The job service, a thread of this process, decides (``core.membership``); the supervision starts and kills processes
on its orders. One poll serves hosts, processes and decisions; only the script runs in a thread of its own.
"""

from __future__ import annotations

import random
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.config import MEETING
from horovod.core.membership_events import (
    Assign,
    Begin,
    Discovered,
    Ended,
    Fence,
    Finish,
    Leaving,
    Note,
    Paused,
    Silent,
    Slot,
    Start,
    TrainingOver,
)  # fmt: skip
from horovod.errors import LaunchError
from horovod.launch.discovery import Discovery
from horovod.launch.elastic_members import ElasticMembers, signature
from horovod.launch.elastic_options import ElasticOptions
from horovod.launch.host_pool import Pool, ReadyHost
from horovod.launch.hosts import HostSlots
from horovod.launch.job import Job
from horovod.launch.local import LocalJob
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchPlan, Share, host_variables, slot_variables
from horovod.launch.remote import RemoteJob
from horovod.launch.report import Exit
from horovod.launch.supervision import RankPlace, Supervision
from horovod.rendezvous.endings import how_ended
from horovod.rendezvous.service import Service

__all__ = ["ElasticJob"]

_TRACEBACK_LINES = 1000
_BEFORE = ", before the ranks had met"
_LOOK_S = 0.5  # between two looks at whether processes wait for one that has ended early


class ElasticJob(Supervision):
    """An elastic job. A *rank* of ``Supervision`` is a process number here; members of a generation have ranks, too.

    The plan names no rank. ``offers`` are the hosts that may be used, empty when a script names them; ``endpoints`` are
    the service's, for this host and for others; ``call`` is a pickled call of ``horovod.run``, empty for a command.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        sinks: tuple[OutputSink, OutputSink],
        options: ElasticOptions,
        service: Service,
        pool: Pool,
        offers: Mapping[str, HostSlots],
        endpoints: tuple[str, str],
        output_dir: str = "",
        call: bytes = b"",
    ) -> None:
        super().__init__(plan, sinks)
        self._options, self._service = options, service
        self._endpoints, self._output_dir, self._call = endpoints, output_dir, call
        self._offers, self._answer, self._lines = offers, offers, list[str]()
        self._pool, pool.plan = pool, plan
        self._discovery: Discovery | None = None
        self._hosts: dict[tuple[str, int | None], tuple[Job, int]] = {}  # job and cores, by host and only slot
        self._usable: dict[str, int] = {}
        self._absent: list[Slot] = []  # slots to be started as soon as they are ready
        self._members = ElasticMembers()
        self._silent: dict[int, str] = {}  # reasons for which silent processes would be killed
        self._ended_early = ""  # the first process that ended well, while the ranks have not met, as in plain programs
        self._finish: Finish | None = None
        self._stdin: int | None = None
        self._chaos_at: float | None = None

    def start(self, stdin: int | None) -> None:
        self._stdin = stdin
        options = self._options
        self.expect_init(options.num_proc)
        self.poll.register(self._service.fileno(), select.POLLIN)
        if options.script:
            self._discovery = Discovery(
                options.script, options.slots, self.plan.hostname, self.plan.environ, self._told, self.is_final
            )
            self._answer = self._discovery.start()
        self._pool.offer(self._answer)
        self._update(is_changed=True)

    def _told(self, hosts: Mapping[str, HostSlots], line: str) -> None:
        """Take the script's answer, in its thread."""
        self._answer = hosts
        if line:
            self._lines.append(line)
        self.wake()

    def adopt(self, ready: Sequence[ReadyHost]) -> None:
        """Start using hosts."""
        for name, link, cores, number, own in ready:
            plan, job = own or self.plan, link
            if not isinstance(job, Job):
                job = LocalJob(plan, self._call) if job is None else RemoteJob(plan, job, self._call, name)
            self.add_job(job, self._stdin)
            self._hosts[name, number] = job, cores
            if number is not None and self._absent:
                self._fill(Slot(name, number))

    def _update(self, is_changed: bool = False) -> None:
        """Tell the membership which hosts can be used now."""
        if self._answer is not self._offers:
            self._offers, is_changed = self._answer, True
            self._pool.offer(self._offers)
            slots, size = sum(offer.slots for offer in self._offers.values()), self._options.num_proc
            if slots < size and not self._members.ledger.generation and not self.is_final():
                self.say(f"waiting for hosts: the script names {slots} of {size} slots")
        try:
            ready = self._pool.tend(self.poll)
        except LaunchError as error:
            self._end(str(error))
            return
        self.adopt(ready)
        for lines in (self._pool.problems, self._lines):
            while lines:
                self.say(lines.pop(0))
        if (usable := self._pool.usable) != self._usable or ready or is_changed:
            self._usable = usable
            self._service.put(Discovered(usable))

    def on_poll(self) -> None:
        super().on_poll()
        if self._finish is None and not self.outcome.interrupted:
            self._update()
            now = time.monotonic()
            if line := self._members.ledger.waiting(now, self._options.minimum):
                self.say(line)
            self._make_chaos(now)
        self._obey()
        if self._ended_early and self._service.is_awaited and not self.is_final():
            self._end(f"{self._ended_early}{_BEFORE}")

    def _obey(self) -> None:
        """Carry out what the membership has decided."""
        for decision in self._service.take():
            if self._finish is not None or self.outcome.interrupted:
                continue
            if isinstance(decision, Start):
                if not self._ended_early:
                    self._start_process(decision.slot)
            elif isinstance(decision, Fence):
                self._fence(decision)
            elif isinstance(decision, Silent):
                self._probe(decision)
            elif isinstance(decision, Paused):
                self._members.ledger.changing(time.monotonic())
            elif isinstance(decision, Assign):
                self._members.assigned(time.monotonic(), decision)
                self._name_late(decision)
            elif isinstance(decision, Begin):
                self._begin(decision)
            elif isinstance(decision, TrainingOver):
                self._members.ledger.is_trained = True
            elif isinstance(decision, Note):
                self.say(decision.text)
            elif isinstance(decision, Finish):
                self._end(decision.why)

    def due_at(self) -> list[float]:
        if self.is_final():
            return []
        own = [at for at in (self._members.ledger.due_at(), self._chaos_at) if at is not None]
        own += [time.monotonic() + _LOOK_S] if self._ended_early else []
        return super().due_at() + self._pool.due_at() + own

    def _start_process(self, slot: Slot) -> None:
        found = self._hosts.get((slot.host, None)) or self._hosts.get((slot.host, slot.number))
        if found is None:
            if any(name == slot.host for name, _ in self._hosts):
                self._absent.append(slot)
            else:
                self._service.put(Ended(slot, "was lost with its host before it was started"))
            return
        job, cores = found
        process, rank, size = self._members.start(slot, self._options.num_proc)
        count = min(self._pool.usable.get(slot.host, slot.number + 1), self._options.maximum)
        is_here = isinstance(job, LocalJob)
        own = {
            **host_variables(self.plan.environ, Share(slot.host, count, cores)),
            MEETING: self._endpoints[not is_here],
            **slot_variables(slot.host, slot.number, count, rank, size),
        }
        label = f"[{slot}]<{{stream}}>:" if self._members.ledger.size else self._label(process)
        folder = f"{self._output_dir}/rank.{process}" if self._output_dir else ""
        try:
            self.start_rank(process, RankPlace(job, slot.number), own, label, folder)
        except LaunchError as error:
            del self._members.running[slot]
            self._end(str(error))

    def _fill(self, ready: Slot) -> None:
        """Start the process that waits for this slot; if none does, report another absent slot as lost."""
        slot = ready if ready in self._absent else self._absent[0]
        self._absent.remove(slot)
        if slot == ready:
            self._start_process(slot)
        else:
            self._service.put(Leaving(slot))  # it has not failed, so that it does not count as a failure of the script
            self._service.put(Ended(slot, f"was lost, and {ready} has come instead"))

    def _label(self, rank: int) -> str:
        return self.plan.display.label.format(rank=rank, stream="{stream}")

    def _fence(self, decision: Fence) -> None:
        process = self._members.running.get(decision.slot)
        if process is not None:
            self._members.fenced[process] = decision.why
            self.places[process].job.kill_rank(process)

    def _name_late(self, assign: Assign) -> None:
        """Name the processes that the first generation begins without."""
        few, size = len(assign.positions), self._options.num_proc
        if assign.generation == 1 and few < size:
            late = ", ".join(str(slot) for slot in self._members.running if slot not in assign.positions)
            more = f": {late} did not call init() in time" if late else ""
            self.say(f"the job begins with {few} of {size} ranks{more}")

    def _probe(self, decision: Silent) -> None:
        process = self._members.running.get(decision.slot)
        if process is not None:
            self._silent[process] = decision.why
            self.places[process].job.kill_stopped(process, decision.pid)

    def on_stopped(self, rank: int) -> None:
        self._members.fenced[rank] = self._silent[rank]

    def _begin(self, begin: Begin) -> None:
        self._ended_early = ""
        now = time.monotonic()
        lines = self._members.begun(now, begin.generation, begin.progress, lambda p: f"on {self._slot_of(p)}")
        for process, rank in self._members.ranks.items():
            self.streams.relabel(process, self._label(rank))
        for line in lines:
            self.say(line)
        if self._options.chaos_s and self._chaos_at is None:
            self._chaos_at = self._next_chaos(now)
        self._check_error()

    def _check_error(self) -> None:
        if (why := self._members.script_error()) and not self.is_final():
            self._end(why)

    def _slot_of(self, process: int) -> Slot:
        place = self.places[process]
        return Slot(place.job.host, place.slot)

    def rank_of(self, process: int) -> int | None:
        return self._members.rank_of(process)

    def on_exit(self, ended: Exit) -> None:
        process, slot = ended.rank, self._slot_of(ended.rank)
        if self._members.running.get(slot) == process:
            del self._members.running[slot]
        self._obey()  # the ranks may have met before it ended
        if self._finish is not None or self.outcome.interrupted:
            return
        how = ended.how or how_ended(ended.status)
        if why := self._members.fenced.pop(process, ""):
            how = f"was killed by {self.plan.display.launcher}: {why}"
        if ended.status == 0 and not self._members.ledger.generation:
            self._ended_early = self._ended_early or f"{self._name(process, ended.pid)} {how}"
            if not self._members.running:
                failures, well = self._members.ledger.failures, sum(e.status == 0 for e in self.outcome.exits)
                is_short = well < (self._options.num_proc if failures else self._options.minimum)
                cause = f"{failures[-1].who} {failures[-1].how}" if failures else self._ended_early
                self._end(f"{cause}{_BEFORE}" if is_short else "")
        elif ended.status == 0 and self._members.was_member(process):
            for line in self._members.left(process, self._name(process, ended.pid)):
                self.say(line)
            self._service.put(Ended(slot))
        else:
            self._take_end(process, slot, ended.pid, how, ended.status)

    def _take_end(self, process: int, slot: Slot, pid: int, how: str, status: int) -> None:
        """Handle the end of a process that had not done its work."""
        who = self._name(process, pid)
        code = 128 - status if status < 0 else status
        self.streams.catch_up(process)
        error = signature(self.streams.tail(process, _TRACEBACK_LINES)) if status > 0 else ""
        self.outcome.failed_call = self.places[process].job.results.get(process, b"")
        for line in self._members.lost(time.monotonic(), process, who, how, code, error):
            self.say(line)
        self._check_error()
        self._service.put(Ended(slot, how))
        if (status > 0 or self._ended_early) and not self._members.ledger.generation:
            self._end(f"{who} {how}{_BEFORE}")

    def _name(self, process: int, pid: int = 0) -> str:
        own = self.places[process].job.name_of(process) or (f"pid {pid}" if pid else "")
        return f"{self._members.name(process)} ({f'{own} ' if own else ''}on {self._slot_of(process)})"

    def on_lost(self, job: Job, reason: str) -> None:
        ended = {e.rank for e in self.outcome.exits}
        lost = [process for process, place in self.places.items() if place.job is job and process not in ended]
        self.outcome.lost.update(dict.fromkeys(lost, job.host))
        name, number = next(key for key, (other, _) in self._hosts.items() if other is job)
        del self._hosts[name, number]
        job.close()
        self._jobs.remove(job)
        if self._finish is not None or self.outcome.interrupted:
            return
        self._pool.lose(name, number)
        usable = self._pool.usable
        self._service.put(Discovered(usable))
        for slot in [slot for slot in self._absent if slot.host not in usable]:
            self._absent.remove(slot)
            self._service.put(Ended(slot, "was lost with its host before it was started"))
        for process in lost:
            slot = self._slot_of(process)
            self._members.running.pop(slot, None)
            self._take_end(process, slot, 0, f"was lost with its {self.plan.display.place}: {reason}", 0)

    def is_final(self) -> bool:
        return self._finish is not None or bool(self.outcome.interrupted)

    def _end(self, why: str) -> None:
        """End the job; an empty reason means success."""
        self._finish = Finish(why)
        for process, reason in self._members.fenced.items():  # the kernel has not ended them yet
            who, how = self._name(process), f"was killed by {self.plan.display.launcher}: {reason}"
            for line in self._members.lost(time.monotonic(), process, who, how, 128 + signal.SIGKILL, ""):
                self.say(line)
        for job in tuple(self._running.values()):
            job.finish()
        if why:
            self.end_soon()
        else:
            for process in self._members.running.values():
                if not self._members.was_member(process):  # spares, and newcomers that come too late
                    self.streams.mute(process)
                    self.places[process].job.kill_rank(process)
            if self._members.fenced and self._members.fenced.keys() >= set(self._members.running.values()):
                self.end(b"K")  # the kernel has not ended them yet, and may need any time
            self._over |= not self._running

    def _make_chaos(self, now: float) -> None:
        if self._chaos_at is None or now < self._chaos_at:
            return
        self._chaos_at = self._next_chaos(now)
        alive = [process for process in self._members.ranks if process in self._members.running.values()]
        is_training = not (self._members.is_meeting or self._members.ledger.is_trained)
        if is_training and len(alive) == len(self._members.ranks) > 1:
            process = random.choice(alive)
            self.say(f"--chaos kills rank {self._members.ranks[process]} on {self._slot_of(process)}")
            self.places[process].job.kill_rank(process)

    def _next_chaos(self, now: float) -> float:
        return now + self._options.chaos_s * random.uniform(0.5, 1.5)

    def run(self) -> None:
        super().run()
        self.outcome.lines, self.outcome.code = self._report()

    def _report(self) -> tuple[list[str], int]:
        why = self._finish.why if self._finish is not None else ""
        now, lines, failures = time.monotonic(), list[str](), self._members.ledger.failures
        if self.outcome.interrupted:
            lines.append(f"{signal.Signals(self.outcome.interrupted).name} received; nothing is left running")
        elif why or self.outcome.error:
            lines.append(self.outcome.error or f"the job has ended: {why}")
            lines += ["the processes that failed:", *self._members.ledger.causes()] if failures else []
        summary = self._members.ledger.summary(now, self._service.progress)
        lines += [summary] if summary else []
        if self.outcome.interrupted:
            return lines, 128 + self.outcome.interrupted
        return lines, (failures[-1].code or 1 if failures else 1) if why or self.outcome.error else 0

    def results(self) -> list[Any]:
        """Return the results of the last generation's ranks that have ended well, in rank order."""
        well = {ended.rank for ended in self.outcome.exits if ended.status == 0}
        places = self._members.ranks or {process: process for process in well}  # the function did not call init()
        ranks = sorted((rank, process) for process, rank in places.items() if process in well)
        return [self.places[process].job.results.get(process, b"") for _, process in ranks]

    def close(self) -> None:
        if self._discovery is not None:
            self._discovery.close()
        self._pool.close()
        super().close()
