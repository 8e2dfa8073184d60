"""Jobs that a benchmark starts: their events are heard, and they end."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from horovod.bench.jobs import parse_event, run_job, write_event

SAYS = "from horovod.bench.jobs import write_event; print('hello'); write_event({'n': 1})"


def test_events_are_heard_and_other_output_passes(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[dict[str, Any]] = []
    assert run_job([sys.executable, "-c", SAYS + "; raise SystemExit(3)"], heard.append) == 3
    assert heard == [{"n": 1}]
    assert capfd.readouterr().err == "hello\n"


def test_a_listener_that_fails_ends_the_job() -> None:
    def fail(event: dict[str, Any]) -> None:
        raise KeyError(event["n"])

    with pytest.raises(KeyError):
        run_job([sys.executable, "-c", SAYS + "; import threading; threading.Event().wait()"], fail)


def test_an_event_is_found_behind_a_launchers_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    write_event({"n": 1})
    assert parse_event("[1,0]<stdout>:" + capsys.readouterr().out) == {"n": 1}
    assert parse_event('{"n": 1}\n') is None
