"""Why the connection with a host has ended: what the launcher knows is waited for, but not for long."""

from __future__ import annotations

import pytest

from horovod.links.hosts import suspects
from horovod.links.hosts.suspects import Suspects


class Launcher:
    """Knows what became of ranks, sooner or later."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self.asked: list[int] = []
        self.closed: list[int] = []

    def ask(self, rank: int) -> Question:
        self.asked.append(rank)
        return Question(self, rank)


class Question:
    """One question to it."""

    def __init__(self, launcher: Launcher, rank: int) -> None:
        self._launcher, self._rank = launcher, rank

    def news(self) -> str:
        return self._launcher.known.get(self._rank, "")

    def close(self) -> None:
        self._launcher.closed.append(self._rank)


def test_a_host_is_given_up_when_it_is_known_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "_PATIENCE_S", 1e6)
    launcher = Launcher()
    found = Suspects(launcher.ask)
    assert not found.is_busy
    found.note(1, 2)
    found.note(2, 4)
    assert found.is_busy
    assert list(found.settled(False)) == []
    launcher.known[4] = "was killed by SIGKILL"
    assert list(found.settled(False)) == [(2, "was killed by SIGKILL")]
    assert list(found.settled(False)) == []
    assert (launcher.asked, launcher.closed) == ([2, 4], [4])
    launcher.known[2] = "ended with exit code 3"
    assert list(found.settled(False)) == [(1, "ended with exit code 3")]
    assert not found.is_busy


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_host_is_given_up_when_nobody_knows_why(monkeypatch: pytest.MonkeyPatch, is_elastic: bool) -> None:
    alone = Suspects(None)
    alone.note(1, 2)
    assert list(alone.settled(False)) == [(1, "")]
    monkeypatch.setattr(suspects, "_PATIENCE_S", 1e6 * is_elastic)
    monkeypatch.setattr(suspects, "_ELASTIC_S", 1e6 * (not is_elastic))
    launcher = Launcher()
    found = Suspects(launcher.ask, is_elastic)
    found.note(1, 2)
    assert list(found.settled(False)) == [(1, "")]
    assert launcher.closed == [2]


def test_who_ends_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "_PATIENCE_S", 1e6)
    launcher = Launcher()
    found = Suspects(launcher.ask)
    found.note(1, 2)
    found.note(2, 4)
    assert list(found.settled(False)) == []
    found.note(3, 6)
    assert list(found.settled(True)) == [(1, ""), (2, ""), (3, "")]
    assert (launcher.asked, launcher.closed) == ([2, 4], [2, 4])


def test_the_launcher_is_asked_once_whether_a_host_has_ended() -> None:
    launcher = Launcher()
    found = Suspects(launcher.ask)
    assert not found.has_ended(1, 2)
    launcher.known[2] = "was lost with its host"
    assert found.has_ended(1, 2)
    found.close()
    assert (launcher.asked, launcher.closed, found.is_busy) == ([2], [2], False)
    assert not Suspects(None).has_ended(1, 2)
