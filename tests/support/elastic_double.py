"""An elastic job of one rank without a job service, a state that tells what is called, and one of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horovod import context
from horovod.bindings import process_sets
from horovod.bindings.elastic.state import ObjectState, State
from horovod.bindings.elastic.variables import VariablesState

__all__ = ["Arrays", "Job", "Told", "begin_anew", "failing", "job", "make_job"]


class Job:
    """The job service of a job of one rank, as ``context`` shows it.

    Attributes:
        events: what happened, in order.
        wants: whether it wants a change.
        answers: what the next calls of ``renew`` raise; None for nothing.
        behind: ranks that are behind after the next meetings.
        previous: by rank, the ranks before the next meetings.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.wants = False
        self.answers: list[Exception | None] = []
        self.behind: list[tuple[int, ...]] = []
        self.previous: list[tuple[int, ...]] = []
        self.number = 0
        self.view = context.MembershipView(0, (), (-1,))

    def renew(self, progress: int = 0, digest: str = "") -> None:
        """Meet anew."""
        self.events.append(("renew", progress))
        if self.answers and (error := self.answers.pop(0)) is not None:
            raise error
        self.wants = False
        behind = self.behind.pop(0) if self.behind else ()
        previous = self.previous.pop(0) if self.previous else (0 if self.number else -1,)
        self.view = context.MembershipView(self.number + 1, behind, previous)
        self.number += 1


class Told(ObjectState):
    """A state that tells what is called."""

    def __init__(self, events: list[Any], **kwargs: Any) -> None:
        self.told = events
        super().__init__(lambda value: value, lambda: 0, **kwargs)
        self.register_reset_callbacks([lambda: self.told.append("callback")])

    def save(self) -> None:
        self.told.append("save")
        super().save()

    def restore(self) -> None:
        self.told.append("restore")
        super().restore()

    def sync(self) -> None:
        self.told.append("sync")
        super().sync()

    def reset(self) -> None:
        self.told.append("reset")


def failing(*errors: Exception | None) -> Callable[[Told], str]:
    """A training function that raises one error after the other, and then returns."""
    left = list(errors)

    def train(state: Told) -> str:
        state.told.append("train")
        state.batch += 1
        if left and (error := left.pop(0)) is not None:
            raise error
        return "done"

    return train


def make_job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Make ``context`` show such a job; ``init()`` was called."""
    found = Job()
    monkeypatch.setattr(context, "is_elastic", lambda: True)
    monkeypatch.setattr(context, "renew", found.renew)
    monkeypatch.setattr(context, "membership", lambda: found.view)
    monkeypatch.setattr(context, "wants_change", lambda: found.wants)
    monkeypatch.setattr(context, "leave_job", lambda: found.events.append("leave"))
    monkeypatch.setattr(State, "_has_declared_steps", False)
    begin_anew(monkeypatch)
    return found


def begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have begun no training, as a new one."""
    monkeypatch.setattr("horovod.bindings.elastic.run._trainings", (b"", 0))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """An elastic job."""
    process_sets.init()
    yield make_job(monkeypatch)
    process_sets.shutdown()


class Arrays(VariablesState):
    """A state whose variables are arrays, of a framework that sends them nowhere."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays
        super().__init__()

    def _shared(self) -> Any:
        return self.arrays

    def _arrays(self, variables: Any) -> Any:
        return variables

    def _hold(self, variables: Any) -> Any:
        return [array.copy() for array in variables]

    def _put(self, variables: Any, held: Any) -> None:
        for array, value in zip(variables, held, strict=True):
            array[:] = value

    def _send(self) -> None:
        pass
