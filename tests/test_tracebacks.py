"""An error that ends a script is shown up to the user's line, before and after init(); other hooks keep their turn."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import horovod.numpy as hvd
from horovod.tracebacks import shorten

INSIDE = re.compile(r'File ".*/horovod/(?!.*test)')

HOOKS = """
import sys
def first(kind, error, trace):
    print("first", kind.__name__)
def second(kind, error, trace):
    print("second", kind.__name__)
    before(kind, error, trace)
sys.excepthook = first
import horovod.numpy as hvd
before, sys.excepthook = sys.excepthook, second
hvd.init()
hvd.allreduce("text")
"""


def fails(call: Callable[[], object]) -> str:
    """Return the text that is shown of the error of ``call``."""
    with pytest.raises(Exception) as caught:
        call()
    shorten(caught.value)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "call",
    [
        hvd.rank,
        hvd.barrier,
        hvd.stats,
        lambda: hvd.allreduce(np.ones(3)),
        lambda: hvd.allreduce(np.ones(3), op=99),
        lambda: hvd.allreduce(np.ones(3), op=hvd.Sum, average=True),
        lambda: hvd.broadcast_object({}, 0),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.init(comm="x"),
        lambda: hvd.init(comm=3),
        lambda: hvd.init(process_sets=[3]),  # type: ignore[list-item]
        lambda: hvd.ProcessSet(["a"]),  # type: ignore[list-item]
    ],
)
def test_an_error_ends_at_the_line_of_the_user(call: Callable[[], object]) -> None:
    shown = fails(call)
    assert not INSIDE.search(shown), shown
    assert re.search(r"line \d+, in (<lambda>|fails)\n.*\n.*\n?.*Error: .", shown), shown


def test_a_decorator_of_this_package_is_not_shown_between_lines_of_the_user() -> None:
    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        hvd.rank()

    shown = fails(lambda: train(hvd.elastic.ObjectState(lambda value: value, lambda: 0, x=1)))
    assert "in <lambda>" in shown and "in train\n" in shown
    assert not INSIDE.search(shown), shown


@pytest.mark.parametrize("module", ["horovod.engine.signals", "torch.nn"])
def test_an_interrupt_inside_this_package_is_shown_up_to_the_line_of_the_user(module: str) -> None:
    scope = {"__name__": module}
    exec("def stop():\n    raise KeyboardInterrupt", scope)
    with pytest.raises(KeyboardInterrupt) as caught:
        scope["stop"]()  # type: ignore[operator]
    shorten(caught.value)
    assert ("in stop\n" in "".join(traceback.format_exception(caught.value))) == (module == "torch.nn")


def test_causes_are_short_too() -> None:
    def call() -> None:
        try:
            hvd.rank()
        except ValueError as error:
            raise KeyError("of the script") from error

    shown = fails(call)
    assert "direct cause" in shown
    assert not INSIDE.search(shown), shown


def test_what_fails_inside_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.bindings.reductions.warn_deprecated", lambda text: int(text))
    shown = fails(lambda: hvd.allreduce(np.ones(3), average=True))
    assert "reductions.py" in shown, shown


def test_hooks_of_the_script_have_their_turn_once_each(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOOKS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["second TypeError", "first TypeError"], done.stderr


def test_a_call_before_init_shows_three_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import horovod.numpy as hvd\nhvd.rank()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback"), done.stderr
    assert lines[1] == f'  File "{script}", line 2, in <module>'
    assert lines[-1].endswith("use hvd.init().")
    assert len(lines) <= 5


def test_an_error_in_a_thread_ends_at_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    hvd.init()
    try:
        thread = threading.Thread(target=lambda: hvd.allreduce("text"))
        thread.start()
        thread.join()
    finally:
        hvd.shutdown()
    [ended] = shown
    assert ended.thread is thread
    text = "".join(traceback.format_exception(ended.exc_type, ended.exc_value, ended.exc_traceback))
    assert __file__ in text and not INSIDE.search(text)
