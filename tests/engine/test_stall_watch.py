"""When the coordinator speaks about what only some ranks have submitted, by a clock that the test turns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import pytest
from paper import PaperJob, request

from horovod.config import Config
from horovod.core.requests import Kind
from horovod.core.stall import Waiting
from horovod.errors import StallError
from horovod.observe import stalls
from horovod.observe.queries import RankStatus
from horovod.observe.stalls import StallWatch


class Clock:
    """Nanoseconds, as ``records.now`` gives them."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


class Answers:
    """In place of ``StatusReports``: the other ranks answer when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.complete = True

    def ask(self, ranks: Iterable[int], wanted: int = 0) -> None:
        self.asked += 1

    def is_complete(self, ranks: Sequence[int]) -> bool:
        return self.complete

    def statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        return {}

    def tell(self, missing: Sequence[int], others: Sequence[int], waiting: Sequence[Waiting]) -> list[str]:
        return [f"rank {rank} is out for lunch" for rank in missing]


class Scene:
    """Three ranks and rank 0's watch; warns after 60 s, ends the job after ``limit_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **config: object) -> None:
        self.clock, self.answers, self.job, self.dumps = Clock(), Answers(), PaperJob(3), [0]
        monkeypatch.setattr(stalls, "now", self.clock)
        monkeypatch.setattr(logging.getLogger("horovod"), "propagate", True)
        self._caplog = caplog
        settings = Config(**config)  # type: ignore[arg-type]
        self.watch = StallWatch(settings, 0, 3, self.answers, self._dump)  # type: ignore[arg-type]

    def _dump(self, why: str) -> None:
        self.dumps[0] += 1

    def after(self, seconds: float) -> list[str]:
        """Let time pass, let the watch look twice, and return what it said."""
        self._caplog.clear()
        self.clock.seconds += seconds
        for _ in range(2):
            self.watch.inspect(self.job.coordinator, len(self.job.log))
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Scene:
    return Scene(monkeypatch, caplog)


def test_nothing_is_said_too_early_and_nothing_twice(scene: Scene) -> None:
    scene.job.submit(0, request("grad", site="train.py:7"))
    assert scene.after(0) == []
    assert scene.after(59) == []
    [text] = scene.after(2)
    assert "for 61.0 s" in text
    assert "allreduce 'grad' (train.py:7): submitted by rank 0, missing: ranks 1, 2" in text
    assert "rank 1 is out for lunch" in text
    assert "rank 2 is out for lunch" in text
    assert scene.after(1000) == []
    assert scene.dumps == [1]


def test_nothing_is_said_of_what_came_in_time(scene: Scene) -> None:
    scene.job.submit(0, request("grad"))
    scene.after(0)
    scene.after(50)
    for rank in (1, 2):
        scene.job.submit(rank, request("grad"))
    scene.job.settle()
    assert scene.after(50) == []
    # The same name, submitted anew, is young again.
    scene.job.submit(0, request("grad"))
    assert scene.after(0) == []
    assert scene.after(59) == []


def test_the_report_waits_for_the_answers(scene: Scene) -> None:
    scene.answers.complete = False
    scene.job.submit(0, request("grad"))
    scene.after(0)
    assert scene.after(61) == []
    assert scene.watch.is_busy
    assert scene.after(1) == []
    assert scene.answers.asked == 1
    scene.answers.complete = True
    assert len(scene.after(1)) == 1
    assert not scene.watch.is_busy


def test_what_waits_for_the_same_ranks_is_one_report(scene: Scene) -> None:
    for name in ("a", "b", "c", "d"):
        scene.job.submit(0, request(name))
        scene.job.submit(1, request(name))
    scene.after(0)
    [text] = scene.after(61)
    assert "and 1 more: submitted by ranks 0, 1, missing: rank 2" in text
    # More of the same kind is not news.
    scene.job.submit(0, request("e"))
    scene.job.submit(1, request("e"))
    scene.after(0)
    assert scene.after(61) == []


def test_ranks_that_have_joined_report_who_submits_nothing(scene: Scene) -> None:
    for rank in (0, 2):
        scene.job.submit(rank, request("join", Kind.JOIN, site="train.py:9"))
    scene.after(0)
    assert scene.after(59) == []
    [text] = scene.after(2)
    assert "for 61.0 s" in text
    assert "join 'join' (train.py:9): submitted by ranks 0, 2, missing: rank 1" in text
    assert "rank 1 is out for lunch" in text
    assert scene.dumps == [1]
    assert scene.after(1000) == []


def test_the_limit_ends_the_wait_of_who_has_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(monkeypatch, caplog, stall_shutdown_s=100.0)
    for rank in (0, 2):
        scene.job.submit(rank, request("join", Kind.JOIN))
    scene.after(0)
    scene.after(61)
    with pytest.raises(StallError, match="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=100") as caught:
        scene.after(40)
    assert "join 'join' (): submitted by ranks 0, 2, missing: rank 1" in str(caught.value)


def test_whatever_is_submitted_starts_the_patience_of_join_anew(scene: Scene) -> None:
    scene.job.submit(0, request("join", Kind.JOIN))
    scene.after(0)
    for _ in range(3):
        assert scene.after(50) == []
        for rank in (1, 2):
            scene.job.submit(rank, request("a"))
        scene.job.settle()


def test_the_limit_ends_the_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(monkeypatch, caplog, stall_shutdown_s=100.0)
    scene.job.submit(0, request("grad"))
    scene.after(0)
    assert len(scene.after(61)) == 1
    with pytest.raises(StallError, match="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=100") as caught:
        scene.after(40)
    assert "missing: ranks 1, 2" in str(caught.value)


def test_the_last_report_is_whole(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(monkeypatch, caplog, stall_shutdown_s=100.0)
    scene.job.submit(0, request("a"))
    scene.after(0)
    scene.after(5)
    scene.job.submit(1, request("b"))
    scene.after(0)
    assert len(scene.after(60)) == 1
    with pytest.raises(StallError) as caught:
        scene.after(36)  # 'a' is over the limit, 'b' nearly
    assert "allreduce 'a' (): submitted by rank 0, missing: ranks 1, 2" in str(caught.value)
    assert "allreduce 'b' (): submitted by rank 1, missing: ranks 0, 2" in str(caught.value)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(monkeypatch, caplog, stall_check_disable=True, stall_shutdown_s=1.0)
    scene.job.submit(0, request("grad"))
    scene.after(0)
    assert scene.after(10_000) == []
    assert scene.answers.asked == 0
