"""Elastic jobs in processes of another system: a host that is lost with its processes, and what the others return."""

from __future__ import annotations

import functools
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from horovod.core.membership_events import Slot
from horovod.errors import LaunchError
from horovod.launch import host_pool, supervision, task
from horovod.launch.call import elastic_results_of, pack
from horovod.launch.elastic import ElasticJob
from horovod.launch.elastic_assembly import run_on_pool
from horovod.launch.elastic_options import ElasticOptions
from horovod.launch.host_pool import HostPool, Pool, ReadyHost
from horovod.launch.hosts import HostSlots
from horovod.launch.job import Job
from horovod.launch.local import LocalJob
from horovod.launch.output import NullSink, TextSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.ssh import Access
from horovod.launch.supervision import RankPlace, Supervision

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class _LostJob(Job):
    """A host that is lost as soon as all its processes have been ordered."""

    def __init__(self, count: int, host: str = "lost") -> None:
        super().__init__(host)
        self._left, self._wake = count, os.eventfd(0, os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def start(self, stdin: int | None) -> None: ...

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        self._left -= 1
        if not self._left:
            os.eventfd_write(self._wake, 1)

    def name_of(self, rank: int) -> str:
        return f"thing {rank}"

    def news(self) -> Iterator[dict[str, Any]]:
        yield {"lost": "its power is off"}

    def kill(self) -> None: ...

    def hang_up(self) -> None: ...

    def close(self) -> None:
        os.close(self._wake)


class _Pool(Pool):
    """Offers a host that will be lost, and another one afterwards."""

    def __init__(self, size: int, call: bytes) -> None:
        self.problems: list[str] = []
        self._size, self._call = size, call
        self._next: str | None = "lost"
        self._ready: list[str] = []

    @property
    def usable(self) -> dict[str, int]:
        return dict.fromkeys(self._ready, self._size)

    def offer(self, hosts: Mapping[str, Any]) -> None: ...

    def lose(self, name: str, number: int | None) -> None:
        self._ready, self._next = [], "kept"

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        name, self._next = self._next, None
        if name is None:
            return []
        self._ready = [name]
        kept = replace(self.plan, hostname=name)
        return [ReadyHost(name, _LostJob(self._size) if name == "lost" else LocalJob(kept, self._call), 1)]

    def due_at(self) -> list[float]:
        return []

    def close(self) -> None: ...


class _SlotPool(_Pool):
    """Offers two slots of host a; the first one is lost, then more happens when another process is wanted there."""

    def __init__(self, call: bytes, then: str) -> None:
        super().__init__(2, call)
        self._then, self._lost = then, [_LostJob(1, "a"), _LostJob(2, "a")]
        self._slots: dict[tuple[str, int], Job | None] = {("a", 0): self._lost[0], ("a", 1): None}
        if then == "both":
            self._slots["a", 1] = self._lost[1]
        else:
            self._lost.pop().close()
        self._news = list(self._slots)
        self.wanted: list[Slot] = []

    @property
    def usable(self) -> dict[str, int]:
        return {name: number + 1 for name, number in sorted(self._slots)}

    def lose(self, name: str, number: int | None) -> None:
        assert number is not None
        del self._slots[name, number]
        if not self._slots:
            self._add(("b", 0), ("b", 1))

    def _add(self, *slots: tuple[str, int]) -> None:
        self._slots |= dict.fromkeys(slots)
        self._news += slots

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        if self.wanted and self._then:
            if self._then == "both":
                os.eventfd_write(self._lost[1].fileno(), 1)
            else:
                self._add((self._then, 0))
            self._then = ""
        news, self._news = self._news, []
        return [ReadyHost(name, self._job(name, number), 1, number) for name, number in news]

    def _job(self, name: str, number: int) -> Job:
        return self._slots[name, number] or LocalJob(replace(self.plan, hostname=name), self._call)

    def due_at(self) -> list[float]:
        return [time.monotonic() + 0.01]


def _run(
    func: Callable[[], Any],
    make: Callable[[bytes], Pool] = functools.partial(_Pool, 2),
    command: tuple[str, ...] = (sys.executable, "-m", task.__name__),
) -> list[Any]:
    call, size = pack(func, (), {}), 2
    options = ElasticOptions(size, size, size)
    policy = replace(options.policy(300, 300), is_discovering=True)
    plan = LaunchPlan(command, "here", dict(os.environ), ())
    sinks = NullSink(), TextSink(sys.stderr)
    outcome, results = run_on_pool(plan, sinks, options, policy, make(call), ["lo"])
    return elastic_results_of(outcome, results, lambda line: None) if command else results


def test_processes_lost_with_their_host_before_the_ranks_meet_do_not_end_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(lambda: os.environ["HOROVOD_LOCAL_RANK"]) == ["0", "1"]
    how = "was lost with its host: its power is off, before it was a member"
    who = [f"a new process (thing {number} on lost:{number})" for number in range(2)]
    assert capsys.readouterr().err.splitlines() == [f"horovodrun: {each} {how}" for each in who]


@pytest.mark.parametrize(
    ("then", "places"), [("a", {"a:0", "a:1"}), ("b", {"a:1", "b:0"}), ("both", {"b:0", "b:1"})],
    ids=["the slot comes back", "a slot of another host comes", "its host is lost, too"],
)  # fmt: skip
def test_a_slot_that_is_lost_is_replaced(then: str, places: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start = ElasticJob.start

    def note_pool(job: Any, stdin: int | None) -> None:
        job._pool.wanted = job._absent
        start(job, stdin)

    def meet() -> str:
        import horovod.numpy as hvd
        from horovod import context

        hvd.init()
        context.renew()
        assert hvd.size() == 2
        return f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_SLOT']}"

    monkeypatch.setattr(ElasticJob, "start", note_pool)
    assert set(_run(meet, functools.partial(_SlotPool, then=then))) == places


def test_an_error_before_the_ranks_meet_ends_the_job() -> None:
    def fail() -> None:
        raise KeyError("no such data")

    with pytest.raises(LaunchError, match=r"\) ended with exit code 1, before the ranks had met"):
        _run(fail)


class _CalledJob(_LostJob):
    """Calls a function in place of each process, as a system does that starts processes by itself."""

    def __init__(self, func: Callable[[int], Any]) -> None:
        super().__init__(0, "called")
        self._func, self._ends = func, list[int]()

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        self.results[rank] = self._func(slot)
        self._ends.append(rank)
        os.eventfd_write(self._wake, 1)

    def finish(self) -> None: ...

    def tell(self, order: bytes) -> None: ...

    def news(self) -> Iterator[dict[str, Any]]:
        os.eventfd_read(self._wake)
        ends, self._ends = self._ends, []
        for rank in ends:
            yield {"ended": rank, "pid": 0, "status": 0, "sent": 0, "has_begun": True}
        if len(self.results) == 2:
            yield {"done": True}


class _CallingPool(_Pool):
    def tend(self, poll: select.poll) -> list[ReadyHost]:
        name, self._next = self._next, None
        self._ready = ["called"]
        return [ReadyHost("called", _CalledJob(lambda slot: slot * 10), 1)] if name else []


def test_a_job_whose_processes_have_no_command() -> None:
    assert _run(lambda: None, lambda call: _CallingPool(2, call), ()) == [0, 10]


def test_processes_that_were_lost_with_their_host_are_not_asked_whether_they_called_init(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(_LostJob):
        def has_begun(self, rank: int) -> bool:
            return False

    class Lost(_LostJob):
        def has_begun(self, rank: int) -> bool:
            raise AssertionError("it was closed")

    monkeypatch.setattr(supervision, "ALONE_S", 0.0)
    watch = Supervision(LaunchPlan((sys.executable, "train.py"), "here", {}, ()), (NullSink(), TextSink(sys.stderr)))
    watch.places = {0: RankPlace(Lost(1), 0), 1: RankPlace(Other(1), 0)}
    watch.outcome.lost = {0: "lost"}
    watch.expect_init(2)
    watch.on_poll()
    watch.close()
    assert "no rank has called hvd.init() in 0 seconds" in capsys.readouterr().err
    for place in watch.places.values():
        place.job.close()


def test_each_problem_of_a_host_is_told_once_after_its_loss_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(["no route to it", "no route to it", "its host key has changed", "no route to it"])

    def check(host: str, access: Access) -> None:
        raise LaunchError(next(found))

    monkeypatch.setattr(host_pool, "HostCheck", check)
    pool = HostPool("here", 1, Access("python"), (1e-9, 1e-9), {})
    pool.offer({"b": HostSlots("b", 1)})
    pool.lose("b")
    for _ in range(4):
        pool.tend(select.poll())
    told = ["b: no route to it", "b: its host key has changed"]
    assert pool.problems == [f"{problem}; it is tried again later" for problem in told]


def test_the_former_hosts_stay_until_one_of_the_new_ones_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(host: str, access: Access) -> None:
        raise LaunchError("no route to it")

    monkeypatch.setattr(host_pool, "HostCheck", check)
    pool = HostPool("here", 1, Access("python"), (1e-9, 1e-9), {})
    pool.offer({"here": HostSlots("localhost", 2)})
    pool.tend(select.poll())
    for other in "bc":
        pool.offer({other: HostSlots(other, 1)})
        pool.tend(select.poll())
        assert pool.usable == {"here": 2}
    pool._ready["c"] = "machine"
    pool.tend(select.poll())
    assert pool.usable == {"c": 1}
    pool.lose("c")
    assert pool.usable == {}


@pytest.mark.parametrize(
    ("offered", "said"),
    [(["b"], "b: it is the same machine as a, its name in this job; offer it as a"),
     (["a", "b"], "b: it is the same machine as a; name each machine once, with all of its slots")],
    ids=["renamed", "named twice"],
)  # fmt: skip
def test_a_machine_of_the_job_under_another_name_is_refused(
    offered: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = SimpleNamespace(incoming=os.eventfd(0, os.EFD_CLOEXEC))
    connection = SimpleNamespace(wire=wire, kill=lambda: None, close=lambda: None)

    def check(host: str, access: Access) -> SimpleNamespace:
        hello = SimpleNamespace(machine="the machine", cores=1)
        return SimpleNamespace(
            host=host, connection=connection, hello=hello, is_done=True, problems=[], tend=lambda: None
        )

    monkeypatch.setattr(host_pool, "HostCheck", check)
    pool = HostPool("here", 1, Access("python"), (1e9, 1e9), {})
    try:
        pool.offer({"a": HostSlots("a", 1)})
        assert [host.name for host in pool.tend(select.poll())] == ["a"]
        pool.offer({name: HostSlots(name, 1) for name in offered})
        assert pool.tend(select.poll()) == []
    finally:
        os.close(wire.incoming)
    assert pool.problems == [f"{said}; it is tried again later"]
