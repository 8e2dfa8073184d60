"""Ranks that are new or behind: what they have, whatever fails while they take the state of the others."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from elastic_double import Job, Told, failing

from horovod.bindings.elastic.run import _Member, run
from horovod.bindings.elastic.state import ObjectState
from horovod.errors import InitError, PeerLostError, RequestError


def test_a_new_rank_that_loses_the_others_before_they_have_talked_lacks_the_state(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be the only one left, and begin the training again at step 0."""

    def exchange(state: Any, is_new: bool) -> Any:
        assert is_new
        raise PeerLostError("x")

    job.behind, job.previous = [(0,)], [(-1, 0)]
    job.answers = [None, InitError("no process is left that has the state")]
    monkeypatch.setattr("horovod.bindings.elastic.run._exchange", exchange)
    with pytest.raises(InitError):
        run(failing())(Told(job.events, batch=0))
    assert [event for event in job.events if event[0] == "renew"] == [("renew", 0), ("renew", -1)]


def test_a_new_rank_goes_back_to_the_step_at_which_it_has_joined(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no commit of the others; what it was made with is none."""
    first = ("x", "x")
    monkeypatch.setattr("horovod.bindings.elastic.run._exchange", lambda *_: [_Member(True, 5, True, 1, first)])

    @run
    def train(state: Told) -> tuple[int, bool, int, int]:
        found = state.progress, state._keeps_steps
        state.batch = state.progress = 9
        state._go_back()
        return *found, state.progress, state.batch

    job.behind, job.previous = [(0,)], [(-1, 0)]
    assert train(Told(job.events, batch=2)) == (5, True, 5, 2)


def test_values_are_sent_unless_the_states_are_equal_and_no_rank_is_new(job: Job) -> None:
    """Buffers and frozen weights, which no digest covers, are a new rank's own."""

    class Seen(Told):
        def digest(self) -> str:
            return "equal on all ranks"

        def sync(self) -> None:
            self.told.append(("equal", self._all_equal))
            super().sync()

    job.previous = [(-1, -1), (0, 1), (0, -1)]
    run(failing(PeerLostError("x"), PeerLostError("y")))(Seen(job.events, batch=0))
    assert [event[1] for event in job.events if event[0] == "equal"] == [False, True, False]


def test_a_new_rank_that_is_in_another_training_of_the_script_ends_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins the script anew, and would give this training the state of that one."""

    def gather(own: Any, name: str) -> list[Any]:
        return [own, (True, 0, False, 1, ("x", "x"))]

    run(failing())(Told(job.events, batch=0))
    monkeypatch.setattr("horovod.bindings.elastic.run.allgather_object", gather)
    with pytest.raises(RequestError, match=r"it is in training 1 of hvd.elastic.run, and others are in training 2"):
        run(failing())(Told(job.events, batch=0))


def test_a_rank_that_is_behind_goes_back_to_its_own_step_if_the_sync_fails(job: Job) -> None:
    """The rank that was ahead is gone, and so may be the others: the last commit can be the beginning of the job."""

    class Fails(Told):
        def sync(self) -> None:
            super().sync()
            if self.told.count("sync") == 2:
                self.batch = 8  # of the rank that is ahead
                raise PeerLostError("in the middle")

    @run
    def train(state: Fails) -> tuple[int, int]:
        state.told.append("train")
        if state.told.count("train") == 1:
            state.batch, state.progress, state._keeps_steps = 7, 3, True
            raise PeerLostError("x")
        return state.batch, state.progress

    job.behind = [(), (0,)]
    assert train(Fails(job.events, batch=0)) == (7, 3)


def test_a_new_rank_that_has_taken_the_values_needs_nothing_more_of_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has sent them may be lost right then, and be the last one of the others."""
    state = Told(job.events, batch=0)

    def send(value: Any, root: int, name: str) -> Any:
        if "sync" in state.told:
            raise PeerLostError("after the values")
        return value

    monkeypatch.setattr("horovod.bindings.elastic.run._exchange", lambda *_: [_Member(False, 5, True, 1, ("x", "x"))])
    monkeypatch.setattr("horovod.bindings.elastic.run.broadcast_object", send)
    job.behind, job.previous = [(0,)], [(-1, 0)]
    run(failing(PeerLostError("in a step")))(state)
    assert [event for event in job.events if event[0] == "renew"] == [("renew", 0), ("renew", 5)]


def test_equal_values_have_the_same_digest_wherever_they_have_come_from() -> None:
    """Else ranks whose values another rank has sent count as behind at each loss, and get the whole state again."""
    sends = (lambda values: values, lambda values: pickle.loads(pickle.dumps(values)))
    states = [ObjectState(send, lambda: 0, epoch=0, place={"epoch": 0}, log=[]) for send in sends]
    for state in states:
        state.sync()
        state.place, state.log = {"epoch": 1}, [*state.log, {"epoch": 1}]
        state.save()
    assert states[0].digest() == states[1].digest()
    states[1].place["epoch"] = 2
    assert states[0].digest() != states[1].digest()
    itself: list[Any] = []
    itself.append(itself)
    states[0].log = itself
    assert states[0].digest()
