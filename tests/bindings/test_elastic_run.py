"""The loop around a training function: which events come in which order, and which errors end it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_double import Arrays, Job, Told, failing

import horovod.numpy as hvd
from horovod.bindings import process_sets
from horovod.bindings.elastic import leave
from horovod.bindings.elastic.notifications import HostUpdateResult, notification_manager
from horovod.bindings.elastic.run import run, run_fn
from horovod.bindings.elastic.state import ObjectState
from horovod.errors import (
    DismissedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InitError,
    MismatchError,
    PeerLostError,
    RequestError,
)

AGAIN = ["reset", "callback", "sync", "train"]
ORDERS: dict[str, tuple[list[Exception | None], list[Any]]] = {
    "nothing happens": ([], []),
    "a loss": ([PeerLostError("x")], ["restore", "renew", *AGAIN]),
    "any error of a collective": ([HorovodInternalError("x")], ["restore", "renew", *AGAIN]),
    "a change": ([HostsUpdatedInterrupt()], ["renew", *AGAIN]),
    "a change by which only others leave": (
        [HostsUpdatedInterrupt(skip_sync=True)],
        ["renew", "reset", "callback", "train"],
    ),
    "a loss after it": (
        [HostsUpdatedInterrupt(skip_sync=True), PeerLostError("x")],
        ["renew", "reset", "callback", "train", "restore", "renew", *AGAIN],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_events_is_horovods(name: str) -> None:
    errors, expected = ORDERS[name]
    events: list[Any] = []
    state = Told(events, batch=0)
    assert run_fn(failing(*errors), lambda: events.append("renew"))(state) == "done"
    assert events == ["sync", "train", *expected]


@pytest.mark.parametrize("name", ORDERS)
def test_an_elastic_job_has_the_same_order(name: str, job: Job) -> None:
    """But for the sync, which new ranks wait for, whatever has changed."""
    errors, expected = ORDERS[name]
    state = Told(job.events, batch=0)
    assert run(failing(*errors))(state) == "done"
    told = ["renew" if event[0] == "renew" else event for event in job.events]
    if isinstance(errors[0] if errors else None, HostsUpdatedInterrupt):
        expected = ["renew", *AGAIN, *expected[expected.index("train") + 1 :]]
    assert told == ["renew", "sync", "train", *expected]


def test_a_failure_that_comes_again_at_the_same_step_ends_the_job_unless_a_rank_was_lost(job: Job) -> None:
    seen: list[int] = []
    errors = [
        HorovodInternalError,
        HorovodInternalError,
        HorovodInternalError,
        PeerLostError,
        *[HorovodInternalError] * 6,
    ]

    @run
    def train(state: Told) -> None:
        seen.append(state.progress)
        if len(seen) == 7:
            state.commit()
        raise errors[len(seen) - 1]("x")

    with pytest.raises(HorovodInternalError):
        train(Told(job.events, batch=0))
    assert seen == [0] * 7 + [1] * 3


def test_an_error_goes_back_to_the_commit_and_a_change_does_not(job: Job) -> None:
    seen: list[tuple[int, int]] = []

    @run
    def train(state: Told) -> None:
        seen.append((state.batch, state.progress))
        if len(seen) == 1:
            state.batch = 5
            state.commit()
            state.batch = 6
            raise PeerLostError("x")
        if len(seen) == 2:
            state.batch = 7
            raise HostsUpdatedInterrupt()
        if len(seen) == 3:
            raise PeerLostError("x")

    train(Told(job.events, batch=0))
    assert seen == [(0, 0), (5, 1), (7, 1), (5, 1)]
    assert [event for event in job.events if event[0] == "renew"] == [("renew", 0)] + 3 * [("renew", 1)]


@pytest.mark.parametrize("phase", ["sync", "callback", "reset"])
def test_a_second_loss_while_the_state_is_brought_together(phase: str, job: Job) -> None:
    state = Told(job.events, batch=0)
    left = [PeerLostError("first")]

    def fail_once() -> None:
        if state.told.count("train") == 1 and left:
            raise left.pop()

    if phase == "callback":
        state.register_reset_callbacks([fail_once])
    else:
        own = getattr(state, phase)
        setattr(state, phase, lambda: (own(), fail_once()))
    assert run(failing(PeerLostError("x")))(state) == "done"
    reached = {"reset": ["reset"], "callback": ["reset", "callback"], "sync": ["reset", "callback", "sync"]}[phase]
    told = ["renew" if event[0] == "renew" else event for event in job.events]
    assert told == ["renew", "sync", "train", "restore", "renew", *reached, "restore", "renew", *AGAIN]


def test_a_second_loss_while_ranks_meet_is_no_event_for_the_script(job: Job) -> None:
    job.answers = [None, PeerLostError("x"), None]
    assert run(failing(PeerLostError("y")))(Told(job.events, batch=0)) == "done"
    assert [e for e in job.events[3:] if e != ("renew", 0)] == ["restore", *AGAIN]
    assert job.events.count(("renew", 0)) == 3


@pytest.mark.parametrize("error", [MismatchError("m"), ValueError("v"), KeyboardInterrupt(), InitError("i")])
def test_errors_of_the_script_end_the_job(error: BaseException, job: Job) -> None:
    with pytest.raises(type(error)) as caught:
        run(failing(error))(Told(job.events, batch=0))  # type: ignore[arg-type]
    assert caught.value is error
    assert job.events == [("renew", 0), "sync", "train"]
    assert not notification_manager.listeners


def test_a_loss_ends_a_job_that_is_not_elastic() -> None:
    events: list[Any] = []
    error = PeerLostError("rank 1 is gone", rank=1)
    with pytest.raises(PeerLostError) as caught:
        run(failing(error))(Told(events, batch=0))
    assert caught.value is error
    assert events == ["sync", "train"]


def test_notices_of_hosts_become_one_interrupt() -> None:
    state = ObjectState(lambda value: value, lambda: 0, batch=1)
    state.check_host_updates()
    for result, expected in ((HostUpdateResult.removed, True), (HostUpdateResult.added, False)):
        notification_manager.register_listener(state)
        notification_manager.handle_hosts_updated(2.0 + result, result)
        notification_manager.handle_hosts_updated(1.0, HostUpdateResult.mixed)  # old news
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is expected
        state.check_host_updates()
        notification_manager.remove_listener(state)
    notification_manager.handle_hosts_updated(9.0, HostUpdateResult.mixed)
    state.check_host_updates()


def test_rank_0_decides_whether_hosts_have_changed(job: Job) -> None:
    job.wants = True
    state = ObjectState(lambda value: (0, 0, 0), lambda: 1, batch=1)
    state.check_host_updates()
    state = ObjectState(lambda value: (0, 4.0, 3), lambda: 1, batch=1)
    job.wants = False
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_an_object_state_saves_copies_and_syncs_what_was_saved() -> None:
    sent: list[Any] = []

    def receive(value: Any) -> Any:
        sent.append(value)
        return {**value, "batch": 30} if isinstance(value, dict) else value

    state = ObjectState(receive, lambda: 0, batch=1, seen=[1])
    state.batch, state.other = 2, "is not part of it"
    state.seen.append(2)
    state.restore()
    assert (state.batch, state.seen) == (1, [1])
    state.batch = 20
    state.seen.append(3)
    state.commit()
    state.batch = 21
    state.sync()
    assert sent[-1] == {"batch": 20, "seen": [1, 3]}
    assert (state.batch, state.seen) == (30, [1, 3])
    state.batch = 31
    state.restore()
    assert state.batch == 30
    with pytest.raises(ValueError, match="cannot have an attribute 'progress'"):
        ObjectState(lambda value: value, lambda: 0, progress=1)


# -- leaving and ending --------------------------------------------------------------------------------------------


def test_variables_are_sent_as_they_are(job: Job) -> None:
    """So what was loaded after the state was made is trained on, and what a reset callback has set."""
    state = Arrays(np.zeros(2))
    state.arrays[0][:] = 1
    state.sync()
    assert state.arrays[0].tolist() == [1, 1]
    state.arrays[0][:] = 2
    state.restore()
    assert state.arrays[0].tolist() == [1, 1], "what was sent is saved"


def test_a_new_rank_learns_of_the_sets_after_a_second_loss(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has met the others before, but they could not tell it which sets there are."""
    told: list[bool] = []

    def exchange(own: Any) -> Any:
        told.append(own[0])
        if len(told) == 1:
            raise PeerLostError("x")
        return [[True, [[4, [0], None, "", True], [2, [], None, "gone", True], [3, [0], None, "", False]]], own]

    monkeypatch.setattr(process_sets, "_exchange", exchange)
    assert run(failing())(Told(job.events, batch=0)) == "done"
    assert job.events[:2] == [("renew", 0), ("renew", 0)]
    assert told == [False, False]
    assert [(each.key, each.ranks) for each in process_sets._registry.entries] == [(4, [0]), (2, [])]
    process_sets.renew()
    assert told[-1]


def test_an_attribute_that_cannot_be_sent_is_named(job: Job) -> None:
    with pytest.raises(RequestError, match=r"Told\.lock, a lock, cannot be sent to other ranks: .*state_dict"):
        run(failing())(Told(job.events, batch=0, lock=threading.Lock()))


def test_a_process_that_is_dismissed_runs_its_functions_and_ends_well(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    hvd.on_leave(lambda: done.append("first"))

    @hvd.on_leave
    def second() -> None:
        done.append("second")
        raise RuntimeError("is logged")

    job.answers = [None, DismissedError("its host was withdrawn")]
    with pytest.raises(SystemExit) as caught:
        run(failing(HostsUpdatedInterrupt()))(Told(job.events, batch=0))
    assert caught.value.code == 0
    assert done == ["second", "first"]
    assert not leave._functions
    (logged,) = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged is not None
    assert (str(logged), logged.__context__) == ("is logged", None)


@pytest.mark.parametrize("is_in_training", [False, True])
def test_sigterm_ends_a_forked_child_without_the_functions(is_in_training: bool, job: Job, tmp_path: Path) -> None:
    """``multiprocessing.Pool`` ends its workers so, and then waits for them."""

    def ended_by() -> int:
        pid = os.fork()
        if pid == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    hvd.on_leave((tmp_path / "left").touch)
    try:
        state = Told(job.events, batch=0)
        assert (run(lambda state: ended_by())(state) if is_in_training else ended_by()) == -signal.SIGTERM
    finally:
        leave._functions.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not any(tmp_path.iterdir())
