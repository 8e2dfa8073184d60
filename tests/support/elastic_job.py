"""An elastic job without horovodrun: a job service with a policy, and a thread that starts processes as it decides.

    def train() -> int:                        # runs in every process; here without the decorator
        hvd.init()
        context.renew()
        ...

    with ElasticJob(train, Policy(3, minimum=2), {"a": 3}, framework="torch") as job:
        job.await_begin(1)                     # the first generation has begun
        job.kill(Slot("a", 1))                 # SIGKILL; the service hears of it as from horovodrun
        job.await_begin(2)
        ends = job.ends()                      # all that have ended, as soon as the job is over
    assert job.finish == ""                    # or why it failed

Processes are forked from a server that has ``framework`` loaded, see ``harness``. Hosts are names: all of them are this
machine; with several the ranks take the way between hosts. A slot of which a process was lost gets another one as the
policy says (``cool_down_s=(0, 0)``: at once; None: never). ``job.discover`` changes the hosts, ``Policy.spares`` keeps
more processes ready. ``print`` of a process goes to the output of the test.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
from harness import LIMIT_S, Outcome, _child, _context, _numbers, _pack, _servers

from horovod.core.membership_events import (
    Assign,
    Begin,
    Decision,
    Discovered,
    Ended,
    Event,
    Fence,
    Finish,
    Policy,
    Silent,
    Slot,
    Start,
)
from horovod.rendezvous.endings import signal_name
from horovod.rendezvous.keys import local_name
from horovod.rendezvous.service import Service

__all__ = ["ElasticJob", "End"]

#: How long processes may take to end by themselves when the job is over.
_GRACE_S = 30.0


@dataclass
class End:
    """How a process ended.

    Attributes:
        slot: where it ran.
        outcome: its result, its exception, its exit code; ``rank`` counts the processes of the job from 0.
        how: what the service was told; empty after a success.
    """

    slot: Slot
    outcome: Outcome
    how: str = ""


@dataclass
class _Process:
    slot: Slot
    process: Any
    pipe: Connection
    outcome: Outcome
    is_read: bool = field(default=False)


class ElasticJob:
    """See the module.

    Args:
        function: called in each process; must call ``init()`` and ``renew()`` itself.
        policy: of the service.
        hosts: name and number of slots of each host.
        args: of ``function``.
        framework: which the processes have loaded.
        env: more environment variables.

    Attributes:
        service: the job service.
        decisions: all that it has taken so far.
        starts: slots in which processes were started, in their order.
        args: of the function.
        finish: why the job ended, empty after a success; None as long as it runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        policy: Policy,
        hosts: Mapping[str, int],
        args: Sequence[Any] = (),
        framework: str = "torch",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._payload, self._framework, self._policy = _pack(function, args), framework, policy
        self._hosts, self.args = dict(hosts), args
        key = secrets.token_bytes(16)
        job = f"test-elastic-{os.getpid()}-{next(_numbers)}"
        self._env = {"HOROVOD_JOB_ID": job, "HOROVOD_SECRET_KEY": key.hex(), "HOROVOD_ELASTIC": "1", **(env or {})}
        addresses = [local_name(key, job)] if len(hosts) == 1 and not policy.is_discovering else ["127.0.0.1"]
        self.service = Service(key, addresses, policy=policy)
        self.decisions: list[Decision] = []
        self.starts: list[Slot] = []
        self.finish: str | None = None
        self._ends: list[End] = []
        self._running: dict[Slot, _Process] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="elastic-job")
        self.service.put(Discovered(self._hosts))
        self._thread.start()

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs, and end the service."""
        self._is_closed = True
        self._thread.join()
        self.service.close()

    def put(self, event: Event) -> None:
        """Tell the service something more, such as ``Leaving``."""
        self.service.put(event)

    def discover(self, hosts: Mapping[str, int]) -> None:
        """Let the job have other hosts."""
        self._hosts = dict(hosts)
        self.service.put(Discovered(self._hosts))

    def pid(self, slot: Slot) -> int:
        """Return the process id of the process that runs in a slot."""
        with self._changed:
            return int(self._running[slot].process.pid)

    def kill(self, slot: Slot, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process in a slot."""
        os.kill(self.pid(slot), number)

    def slots(self, generation: int | None = None) -> list[Slot]:
        """Return the slots of a generation, or of the latest one, by rank."""
        with self._changed:
            found = [d for d in self.decisions if isinstance(d, Assign) and generation in (None, d.generation)]
            return list(found[-1].positions) if found else []

    def await_begin(self, generation: int) -> None:
        """Wait until a generation, or a later one, has begun."""
        self.await_decision(lambda d: isinstance(d, Begin) and d.generation >= generation, f"Begin({generation})")

    def await_decision(self, is_it: Callable[[Decision], bool], what: str = "a decision") -> Decision:
        """Wait for a decision of the service, and return it; fails at once when the job has ended without it."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while True:
                for decision in self.decisions:
                    if is_it(decision):
                        return decision
                assert self.finish is None, f"the job ended before {what}: {self.finish}\n{self._errors()}"
                assert self._changed.wait(deadline - time.monotonic()), f"{what} did not come; {self.decisions[-9:]}"

    def ends(self) -> list[End]:
        """Wait until the job is over and all processes have ended; return how, in the order of their ends."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while self.finish is None or self._running:
                assert self._changed.wait(deadline - time.monotonic()), f"running: {list(self._running)}"
            return list(self._ends)

    def values(self) -> dict[Slot, Any]:
        """Wait until the job is over; return what the processes returned that ended well.

        Raises:
            AssertionError: the job failed; with the errors of all processes.
        """
        ends = self.ends()
        assert self.finish == "", f"{self.finish}\n{self._errors()}"
        return {end.slot: end.outcome.value for end in ends if not end.how}

    def _errors(self) -> str:
        return "\n".join(f"--- slot {end.slot}, {end.how}\n{end.outcome.text}" for end in self._ends[-9:])

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended_at = float("inf")
        while True:
            with self._changed:
                running = list(self._running.values())
            if not running and (self._is_closed or self.finish is not None):
                return
            sources: list[Any] = [self.service.fileno(), *(one.process.sentinel for one in running)]
            wait([*sources, *(one.pipe for one in running if not one.is_read)], timeout=0.05)
            for one in running:
                self._look_after(one)
            for decision in self.service.take():
                self._obey(decision)
            if self.finish is not None:
                ended_at = min(ended_at, time.monotonic())
            if self._is_closed or time.monotonic() - ended_at > _GRACE_S:
                for one in list(self._running.values()):
                    one.process.kill()

    def _look_after(self, one: _Process) -> None:
        has_ended = not one.process.is_alive()
        if not one.is_read and one.pipe.poll():
            one.is_read = True
            try:
                one.outcome.value, one.outcome.error, one.outcome.text = cloudpickle.loads(one.pipe.recv_bytes())
            except EOFError:
                pass
        if not has_ended:
            return
        one.process.join()
        code = one.outcome.exitcode = one.process.exitcode
        how = "" if code == 0 else f"exited with code {code}" if code > 0 else f"was killed by {signal_name(-code)}"
        with self._changed:
            self._ends.append(End(one.slot, one.outcome, how))
            del self._running[one.slot]
            one.process.close()
            one.pipe.close()
            self._changed.notify_all()
        self.service.put(Ended(one.slot, how))

    def _obey(self, decision: Decision) -> None:
        if isinstance(decision, Start) and not self._is_closed:
            self._start(decision.slot)
        elif isinstance(decision, Fence):
            self._running[decision.slot].process.kill()  # also one that is stopped
        elif isinstance(decision, Silent) and decision.slot in self._running:
            stat = Path(f"/proc/{decision.pid}/stat").read_bytes() if decision.pid == self.pid(decision.slot) else b""
            if stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"]):
                self._running[decision.slot].process.kill()
        with self._changed:
            self.decisions.append(decision)
            if isinstance(decision, Finish):
                self.finish = decision.why
            self._changed.notify_all()

    def _start(self, slot: Slot) -> None:
        number = len(self.starts)
        env = {
            **self._env,
            "HOROVOD_MEETING": ",".join(self.service.endpoints),
            "HOROVOD_HOSTNAME": slot.host,
            "HOROVOD_SLOT": str(slot.number),
            "HOROVOD_LOCAL_SIZE": str(self._hosts.get(slot.host, slot.number + 1)),
            "HOROVOD_RANK": str(number),
            "HOROVOD_SIZE": str(max(self._policy.size, number + 1)),
            "HOROVOD_START_TIMEOUT": f"{LIMIT_S:g}",
            "OMP_NUM_THREADS": "1",
        }
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_child, args=(number, env, self._payload, theirs, False))
        _servers[self._framework].start(process)
        theirs.close()
        with self._changed:
            self.starts.append(slot)
            self._running[slot] = _Process(slot, process, ours, Outcome(number))
            self._changed.notify_all()
