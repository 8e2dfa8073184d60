"""The state of the engine by itself: events in, instructions out, without threads and processes."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest

from horovod.core.coordinator import LogEntry
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import Kind, Request, Response, TensorSpec
from horovod.engine.execution import Execution
from horovod.engine.handles import CachedRequest, Handle
from horovod.engine.loop import Loop
from horovod.engine.state import Complete, EngineState, Execute, ThreadWait
from horovod.errors import DuplicateNameError, HorovodInternalError, NotInitializedError, PeerLostError

RANK, SIZE = 1, 3
EVERYBODY = (0, 1, 2)


def _state() -> EngineState:
    return EngineState(RANK, ProcessSetTable(SIZE), True, lambda handle: handle.cached.request.name)


def _handle(name: str = "", kind: Kind = Kind.ALLREDUCE, **more: Any) -> Handle:
    request = Request(f"allreduce.{name}" if name else "", kind, 0, (TensorSpec("float32", (3,)),), **more)
    return Handle("numpy", (), (), allocator=None, cached=CachedRequest(request, None), times=[request] + [0] * 7)  # type: ignore[arg-type]


def _declare(state: EngineState, key: int, handle: Handle, members: tuple[int, ...] = EVERYBODY, **more: Any) -> None:
    request = handle.cached.request
    response = Response(request.kind, request.name, 0, members, SIZE, (request,), **more)
    assert state.read(LogEntry((key,), response=response)) is None


def _submit(state: EngineState, handle: Handle) -> Handle:
    state.submit(handle)
    assert state.accept() is handle
    return handle


def test_an_entry_executes_the_submission_of_its_name() -> None:
    state = _state()
    first, second = _submit(state, _handle("a")), _submit(state, _handle("b"))
    _declare(state, 0, second)
    found = state.read(LogEntry((0,), (7, 8, 9)))
    assert isinstance(found, Execute)
    assert [handle for _, handle in found.batch] == [second]
    assert (found.notes, state.sequence, state.in_flight()) == ((7, 8, 9), 1, [first])


def test_submissions_without_a_name_are_answered_in_their_order() -> None:
    state = _state()
    handles = [_submit(state, _handle()) for _ in range(2)]
    _declare(state, 0, handles[0])
    found = [state.read(LogEntry((0,))) for _ in range(2)]
    assert [entry.batch[0][1] for entry in found if isinstance(entry, Execute)] == handles
    assert state.is_idle()


def test_entries_that_are_fused_are_one_execution() -> None:
    state = _state()
    handles = [_submit(state, _handle(name)) for name in "ab"]
    for key, handle in enumerate(handles):
        _declare(state, key, handle)
    found = state.read(LogEntry((0, 1)))
    assert isinstance(found, Execute)
    assert [handle for _, handle in found.batch] == handles
    assert (state.sequence, state.fused, state.fusions) == (1, 2, 1)


def test_an_entry_of_others_is_skipped() -> None:
    state = _state()
    _declare(state, 0, _handle("a"), members=(0, 2))
    assert state.read(LogEntry((0,))) is None
    assert state.sequence == 1


def test_answers_complete_or_fail() -> None:
    state = _state()
    joined = _submit(state, _handle("join", Kind.JOIN))
    _declare(state, 0, joined, result=2)
    assert state.read(LogEntry((0,))) == Complete(joined)
    assert joined.result == 2
    for culprit, kind in ((2, PeerLostError), (RANK, NotInitializedError)):
        lost = _submit(state, _handle("a"))
        _declare(state, 0, lost, error="rank 2 died", error_type="PeerLostError", result=culprit)
        found = state.read(LogEntry((0,)))
        assert isinstance(found, Complete)
        assert type(found.error) is kind
    assert state.culprit == 2


def test_process_sets_change_with_the_log() -> None:
    state = _state()
    added = _submit(state, _handle("", Kind.ADD_PROCESS_SET, ranks=(0, 1)))
    _declare(state, 0, added, result=1)
    state.read(LogEntry((0,)))
    assert state._sets.members(1) == (0, 1)


def test_a_name_may_be_in_flight_once() -> None:
    state = _state()
    _submit(state, _handle("a"))
    with pytest.raises(DuplicateNameError, match="'a' is still in flight"):
        state.submit(_handle("a"))
    assert len(state.in_flight()) == 1


def test_a_submission_is_withdrawn_unless_it_was_taken_over() -> None:
    state = _state()
    early, late = _handle("a"), _submit(state, _handle("b"))
    state.submit(early)
    state.withdraw(early)
    state.withdraw(late)
    assert state.accept() is None
    assert state.in_flight() == [late]


def test_operations_settle_when_all_members_have_reached_the_fence() -> None:
    state = _state()
    first, second = _handle("a"), _handle("b")
    state.unsettled += [(1, EVERYBODY, [first]), (2, EVERYBODY, [second])]
    assert state.settle(lambda members, fence: fence == 2) == [second]
    assert state.in_flight() == [first]


def test_the_first_failure_counts_and_everything_in_flight_fails() -> None:
    state = _state()
    handles = [_submit(state, _handle("a")), _submit(state, _handle())]
    state.submit(late := _handle("b"))
    assert isinstance(state.fail(ValueError("broken")), HorovodInternalError)
    assert state.fail(PeerLostError("later", rank=2)) is None
    assert "broken" in str(state.error())
    assert set(map(id, state.clear())) == set(map(id, [*handles, late]))
    assert state.is_idle()


def test_only_threads_whose_operation_is_not_done_wait() -> None:
    state, handle = _state(), _handle("a")
    state.waits[1] = ThreadWait(5, handle, 1_000_000_000)
    assert state.is_awaited()
    assert state.waited_s(3_000_000_000, 0.0) == 2.0
    handle.finish()
    assert not state.is_awaited()
    assert state.waited_s(3_000_000_000, 0.5) == 0.5


def test_a_submission_is_withdrawn_whose_acceptance_had_begun() -> None:
    class Half(Handle, eq=False):
        """Marked as accepted at every moment, by a thread that has not come to take it from the inbox."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, True if name == "accepted" else value)

    state, plain = _state(), _handle("a")
    handle = Half("numpy", (), (), allocator=plain.allocator, cached=plain.cached, times=plain.times)
    state.submit(handle)
    handle.accepted = True
    state.withdraw(handle)
    assert not state.inbox
    _submit(state, _handle("a"))


def _execution(settled: set[int]) -> Execution:
    transport = SimpleNamespace(settled=lambda members, fence: fence in settled)
    channel = SimpleNamespace(has_news=lambda: False)
    generation = SimpleNamespace(sets=ProcessSetTable(SIZE))
    link: Any = SimpleNamespace(
        rank=RANK, generation=generation, coordinator=None, channel=channel, transport=transport, watch=None
    )
    return Execution(link, None, None)  # type: ignore[arg-type]


def test_an_operation_is_news_that_is_settled_before_an_older_one_of_another_process_set() -> None:
    execution = _execution({2})
    execution.state.unsettled.append((1, (0, 1), []))
    assert not execution.has_news()
    execution.state.unsettled.append((2, (1, 2), []))
    assert execution.has_news()


def test_looking_for_news_survives_a_thread_that_settles_at_this_moment() -> None:
    class Settled(collections.deque[Any]):
        def __bool__(self) -> bool:
            self.clear()
            return True

    execution = _execution(set())
    execution._unsettled = Settled([(1, (0, 1), [])])
    assert not execution.has_news()


def test_a_wait_for_an_operation_that_an_interrupt_lost_ends_with_the_engine() -> None:
    """It was taken out of the state to be executed, and is not done."""
    state, handle = _state(), _handle("a")
    state.fail(NotInitializedError("shut down"))
    engine: Any = SimpleNamespace(
        _state=state,
        _hand_over=lambda handle: SimpleNamespace(acquire=lambda block, timeout_s: False),
        _execution=SimpleNamespace(sweep=state.clear),
        is_over=True,
    )
    Loop._wait_behind(engine, handle, 1.0)
    assert handle.done
    assert isinstance(handle.error, NotInitializedError)
