"""Events survive a launcher that puts its prefix before every line."""

from __future__ import annotations

import pytest

from horovod.bench.events import parse_event, progress, result, write_event


def test_an_event_is_found_behind_a_launchers_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    progress(write_event)(1, 7, "allreduce 64 B")
    assert parse_event("[1,0]<stdout>:" + capsys.readouterr().out) == {
        "event": "progress",
        "done": 1,
        "total": 7,
        "text": "allreduce 64 B",
    }


def test_other_output_is_no_event() -> None:
    assert parse_event('{"event": "progress"}\n') is None


def test_the_recorded_command_is_what_the_user_typed() -> None:
    event = result("train", ["train", "--np", "4", "--events"], 4, {"cores": 2}, [], limit_bytes_s=1.0)
    assert event["result"]["command"] == "python -m horovod.bench train --np 4"
    assert event["result"]["limit_bytes_s"] == 1.0
