"""Asks the user's script, again and again, which hosts an elastic job may use.

The script runs below its own keeper, so that the script and all its child processes end with the job in any case.
"""

from __future__ import annotations

import functools
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from horovod.config import JOB_ID
from horovod.errors import LaunchError
from horovod.launch.hosts import HostSlots, is_this_host, parse_hostfile
from horovod.launch.local import LocalJob
from horovod.launch.plan import LaunchPlan
from horovod.rendezvous.endings import how_ended

__all__ = ["Answers", "Discovery", "ScriptAnswer", "read_answer", "read_hosts"]

PERIOD_S = 1.0
LIMIT_S = 10.0
"""How long the script may run."""
#: Failures in a row after which a known problem is reported again.
_MANY = 60
_MOST_BYTES = 1 << 20
_MOST_QUOTED = 200
_NAME = re.compile(r"[\w.:@%-]+")  # narrower than the names of -H: a script may print an error or a page instead


Hosts = dict[str, HostSlots]  # by the name in the job; a host itself has the name that the user or the script gave


class ScriptAnswer(NamedTuple):
    """Result of one run of the script: hosts, or why there are none."""

    hosts: Hosts
    problem: str = ""


def read_answer(
    status: int | None, out: str, error: str, slots: int, is_here: Callable[[str], bool], own: str
) -> ScriptAnswer:  # fmt: skip
    """Interpret one run of the script; ``status`` is None when it was killed for taking too long. A host for which it
    prints no number has ``slots``; ``own`` is the name of this machine in the job.
    """
    last = "".join(f": {line.strip()[:_MOST_QUOTED]}" for line in error.strip().splitlines()[-1:])
    if status is None:
        return ScriptAnswer({}, f"did not end within {LIMIT_S:g} s")
    if status:
        return ScriptAnswer({}, f"{how_ended(status)}{last}")
    if len(out) >= _MOST_BYTES:  # the last line may be cut
        return ScriptAnswer({}, f"printed {_MOST_BYTES} bytes or more")
    if not out.strip():
        return ScriptAnswer({}, f"printed no host{last}")
    try:
        named = parse_hostfile(out, "its output", slots, allows_zero=True)
        if wrong := [host.name for host in named if not _NAME.fullmatch(host.name)]:
            raise ValueError(f"{wrong[0]!r} is not a name of a host")
    except ValueError as problem:
        return ScriptAnswer({}, f"printed no list of hosts: {problem}"[: 2 * _MOST_QUOTED])
    offered = [host for host in named if host.slots]  # a host with 0 slots is withdrawn
    return ScriptAnswer(read_hosts(offered, is_here, own)) if offered else ScriptAnswer({}, f"printed no host{last}")


def read_hosts(named: Sequence[HostSlots], is_here: Callable[[str], bool], own: str) -> Hosts:
    """Return the hosts by their names in the job, each once; this machine has the name ``own`` there."""
    hosts: Hosts = {}
    for host in named:
        name = own if is_here(host.name) else host.name.rpartition("@")[2]
        before = hosts.get(name, HostSlots(host.name, 0))
        hosts[name] = HostSlots(before.name, before.slots + host.slots)
    return hosts


class Answers:
    """The answers of the script so far."""

    def __init__(self) -> None:
        self.hosts: Hosts = {}  # the last ones that it named
        self._failures = 0  # in a row
        self._told: set[str] = set()  # kinds of problems; details may differ each time
        self._is_told = False  # about a failure of this row

    def add(self, answer: ScriptAnswer) -> str:
        """Add an answer, and return a line for the user; it is empty if there is no news.

        A script that fails now and then is reported once for each way in which it fails, and when it fails for long.
        """
        if not answer.problem:
            line = "the script for hosts works again" if self._is_told else ""
            self.hosts, self._failures, self._is_told = answer.hosts, 0, False
            return line
        self._failures += 1
        kind = answer.problem.partition(": ")[0]
        if kind in self._told and self._failures != _MANY:
            return ""
        self._told.add(kind)
        self._is_told = True
        kept = f"keeping the last {len(self.hosts)} host{'s' * (len(self.hosts) != 1)}"
        return f"the script for hosts {answer.problem}; {kept}"


class Discovery:
    """Runs the script each second, in a thread.

    After each change, the thread calls ``told`` with the hosts and a line for the user, which may be empty. A host for
    which the script prints no number has ``slots``; ``own`` is the name of this machine in the job. ``is_over`` says
    whether nobody needs an answer any more.
    """

    def __init__(
        self, script: str, slots: int, own: str, environ: Mapping[str, str], told: Callable[[Hosts, str], None],
        is_over: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._script, self._slots, self._own, self._told, self._is_over = script, slots, own, told, is_over
        self._is_here = functools.cache(is_this_host)
        job = environ[JOB_ID] + "-discovery"
        self._job = LocalJob(LaunchPlan(("/bin/sh", "-c", script), own, {**environ, JOB_ID: job}, ()))
        self._runs = 0
        self._answers = Answers()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod-discovery", daemon=True)

    def start(self) -> Hosts:
        """Run the script once, then start the thread that repeats it.

        Raises:
            LaunchError: the script failed.
        """
        self._job.start(None)
        answer = self._ask()
        if answer.problem and not answer.problem.startswith("printed no host"):
            raise LaunchError(
                f"--host-discovery-script {self._script} {answer.problem}; it must print lines such as host:2"
            )
        self._answers.add(answer)
        self._thread.start()
        return self._answers.hosts

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            answer = self._ask()
            if self._closed.is_set() or self._is_over():
                return
            before = self._answers.hosts
            line = self._answers.add(answer)
            if line or self._answers.hosts != before:
                self._told(self._answers.hosts, line)

    def _ask(self) -> ScriptAnswer:
        """Run the script once."""
        self._runs += 1
        ends, theirs = zip(os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), strict=True)
        poll = select.poll()
        poll.register(self._job, select.POLLIN)
        for fd in ends:
            os.set_blocking(fd, False)
        texts = {end: bytearray() for end in ends}
        deadline: float | None = time.monotonic() + LIMIT_S
        self._job.start_rank(self._runs, 0, {}, theirs)
        try:
            while not (self._closed.is_set() or self._is_over()):
                self._job.flush()
                poll.poll(100)
                for end, text in texts.items():
                    _drain(end, text)
                for event in self._job.news():
                    if "lost" in event or "done" in event:
                        return ScriptAnswer({}, "cannot be run any more: the process that watches it was killed")
                    if event.get("ended") == self._runs:
                        for end, text in texts.items():
                            _drain(end, text)
                        out, error = (bytes(text).decode(errors="replace") for text in texts.values())
                        status = None if deadline is None else event["status"]
                        return read_answer(status, out, error, self._slots, self._is_here, self._own)
                if deadline is not None and time.monotonic() >= deadline:
                    deadline = None
                    self._job.kill_rank(self._runs)
        finally:
            for end in ends:
                os.close(end)
        return ScriptAnswer({}, "")

    def close(self) -> None:
        """Stop the thread and kill the script. Blocks until the script has ended."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._job.close()


def _drain(fd: int, text: bytearray) -> None:
    """Read the bytes in a pipe; bytes beyond the limit are lost."""
    try:
        while data := os.read(fd, 1 << 16):
            text += data[: _MOST_BYTES - len(text)]
    except BlockingIOError:
        pass
