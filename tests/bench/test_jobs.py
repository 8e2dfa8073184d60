"""Jobs that a benchmark starts: their events are heard, and they end."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from horovod.bench.jobs import run_job
from horovod.errors import LaunchError

SAYS = "from horovod.bench.events import LineReporter; print('hello'); LineReporter()({'event': 'parts', 'n': 1})"


def test_events_are_heard_and_other_output_passes(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[dict[str, Any]] = []
    assert run_job([sys.executable, "-c", SAYS + "; raise SystemExit(3)"], heard.append) == 3
    assert heard == [{"event": "parts", "n": 1}]
    assert capfd.readouterr().err == "hello\n"


def test_a_job_that_does_not_end_is_ended() -> None:
    with pytest.raises(LaunchError, match=r"within 0\.2 s"):
        run_job([sys.executable, "-c", "import threading; threading.Event().wait()"], print, timeout_s=0.2)


def test_a_listener_that_fails_ends_the_job() -> None:
    def fail(event: dict[str, Any]) -> None:
        raise KeyError(event["n"])

    with pytest.raises(KeyError):
        run_job([sys.executable, "-c", SAYS + "; import threading; threading.Event().wait()"], fail)
