"""horovod.run: functions, results, errors."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from launching import TIMEOUT_S, started

import horovod
from horovod.errors import LaunchError
from horovod.launch import task


def test_results_come_in_rank_order() -> None:
    offset = 10

    def work(x: int, scale: int = 1) -> tuple[int, int]:
        return int(os.environ["HOROVOD_RANK"]), (x + offset) * scale

    assert horovod.run(work, args=(1,), kwargs={"scale": 2}, num_proc=3) == [(0, 22), (1, 22), (2, 22)]


def test_lambda_on_one_process() -> None:
    assert horovod.run(lambda: os.environ["HOROVOD_SIZE"]) == ["1"]


def test_a_function_from_another_version_of_python_is_refused(tmp_path: Path) -> None:
    """Such as on a host whose python3 is newer. Running its bytecode would crash."""
    other = "import sys; sys.implementation.cache_tag = 'cpython-399'; from horovod.launch import task; "
    call = tmp_path / "call"
    call.write_bytes(task.pack_call(lambda: 1, (), {}, []))
    program = f"{other}data, _ = task._call(open({str(call)!r}, 'rb').read()); print(task.unpack_result(data).summary)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    version = platform.python_version()
    assert f"the function was sent from Python {version}, and {platform.node()} has {version} at " in ended.stdout


def test_large_results() -> None:
    assert [len(x) for x in horovod.run(lambda: bytes(20 << 20), num_proc=2)] == [20 << 20] * 2


def test_settings_and_files_go_to_the_ranks(tmp_path: Path) -> None:
    def work() -> str:
        print("hello")
        return os.environ["HOROVOD_START_TIMEOUT"]

    found = horovod.run(work, num_proc=2, start_timeout=9, output_filename=str(tmp_path / "out"), hosts="localhost:2")
    assert found == ["9", "9"]
    assert (tmp_path / "out/rank.1/stdout").read_text() == "hello\n"


def test_output_appears_where_the_caller_prints(capsys: pytest.CaptureFixture[str]) -> None:
    horovod.run(lambda: print("hello"), num_proc=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


def test_an_exception_is_raised_here_with_its_traceback() -> None:
    def work() -> None:
        if int(os.environ["HOROVOD_RANK"]) == 1:
            raise KeyError("boom")
        signal.pause()

    with pytest.raises(LaunchError, match="one or more processes exited with non-zero status") as caught:
        horovod.run(work, num_proc=2)
    text = str(caught.value)
    assert "rank 1 on" in text
    assert "KeyError: 'boom'" in text
    assert 'raise KeyError("boom")' in text
    assert "rank 0 (pid" in text
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    "read",
    [None, lambda: os.environ["HOROVOD_RANK"] and ValueError(), dict],
    ids=["not-packed", "read-in-ranks-alone", "no-exception"],
)
def test_an_exception_that_cannot_be_sent_is_still_told(read: Any) -> None:
    """Such as one whose class only the ranks can import."""

    def work() -> None:
        class Odd(Exception):
            def __reduce__(self) -> Any:
                return read, ()

        raise Odd("very odd")

    with pytest.raises(LaunchError, match=r"failed with exit code 1: .*Odd: very odd") as caught:
        horovod.run(work)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: os._exit(7), "failed with exit code 7"),
        (lambda: os.kill(os.getpid(), 9), "was killed by SIGKILL"),
        (lambda: os._exit(0), "ended without a result"),
        (lambda: sys.exit(4), "failed with exit code 4: SystemExit: 4"),
        (sys.exit, r"the function ended with sys.exit\(0\) instead of returning"),
        (lambda: threading.Lock(), "cannot pickle"),
    ],
    ids=["exit 7", "kill", "exit 0", "sys.exit", "sys.exit 0", "no pickle"],
)
def test_ranks_that_return_nothing(work: Any, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        horovod.run(work, num_proc=2)


def test_from_a_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(horovod.run(rank_of_module, num_proc=2)))
    thread.start()
    thread.join(TIMEOUT_S)
    assert results == [[0, 1]]


rank_of_module = eval("lambda: int(__import__('os').environ['HOROVOD_RANK'])")


def test_from_standard_input() -> None:
    script = "import horovod\ndef f(x):\n    return x * 2\nprint(horovod.run(f, (4,), num_proc=2))\n"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.stdout, done.returncode) == ("[8, 8]\n", 0), done.stderr


def test_functions_of_modules_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("def f(x):\n    return x + 1\n")
    (tmp_path / "main.py").write_text("import horovod, parts\nprint(horovod.run(parts.f, (1,), num_proc=2))\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True, cwd="/", timeout=TIMEOUT_S
    )
    assert (done.stdout, done.returncode) == ("[2, 2]\n", 0), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hosts": "localhost:1", "hostfile": "f"}, "hosts or hostfile"),
        ({"hosts": "a:1", "host_discovery_script": "./hosts.sh", "min_num_proc": 1}, "only one of them"),
        ({"use_mpi": True, "min_num_proc": 1}, "use_mpi cannot start an elastic job"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo or use_mpi"),
        ({"num_proc": 0}, "at least 1"),
        ({"hosts": ["a:2"]}, r"-H \['a:2'\] names no host; give one text with host:slots"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "Requested more processes"),
        ({"min_num_proc": 2, "num_proc": 1}, "^min_num_proc 2 is more than num_proc 1$"),
        (
            {"num_proc": 1, "reset_limit": 1},
            "^reset_limit: for elastic jobs; add min_num_proc, or host_discovery_script$",
        ),
        ({"start_timeout": -1}, "HOROVOD_START_TIMEOUT"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        horovod.run(lambda: None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((2,), "^args must be a list or tuple of the function's arguments; received int. The number .* is num_proc$"),
        (("abc",), "^args must be a list or tuple .* received str"),
        (({"x": 1},), "^args must be a list or tuple .* received dict"),
        (((), 2), "^kwargs must be a dict of the function's named arguments; received int$"),
        (((), [1]), "^kwargs must be a dict .* received list$"),
    ],
    ids=str,
)
def test_arguments_of_the_function_that_are_none(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        horovod.run(lambda *_: None, *arguments)


@pytest.mark.parametrize(("work", "said"), [(3, "must be callable"), (threading.Lock().acquire, "cannot send")])
def test_what_cannot_be_called_or_sent(work: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        horovod.run(work)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (lambda: threading.Lock(), "an object of type lock"),
        (lambda: {"a": 1, "b": [threading.Lock()]}, "an object of type dict with an object of type list with"),
        (lambda: (i for i in range(3)), "an object of type generator"),
    ],
)
def test_a_result_that_cannot_be_sent_is_named(result: Any, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=f"the function returned {named}") as caught:
        horovod.run(result, num_proc=1)
    assert "return plain data instead" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert f"the function returned {named}" in capfd.readouterr().err  # all that an elastic job says about it
    # Of our own functions, only run() itself stands between the caller and the error.
    assert [frame.name for frame in caught.traceback] == [sys._getframe().f_code.co_name, "run"]


def test_old_names_still_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="np is deprecated; use num_proc"):
        assert horovod.run(lambda: 1, np=2) == [1, 1]
    with pytest.warns(DeprecationWarning, match="use network_interfaces"):
        assert horovod.run(lambda: 1, network_interface="lo") == [1]


CALLER = """
import horovod, os, signal
def work():
    print("up", os.getpid(), flush=True)
    signal.pause()
horovod.run(work, num_proc=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_caller_is_ended_so_are_the_ranks(number: signal.Signals) -> None:
    with started(CALLER, ranks=2, program=[sys.executable, "-c"]) as running:
        running.process.send_signal(number)
        assert running.still_alive() == []
        ended = running.end()
    assert ended.code == -number
    assert ("KeyboardInterrupt" in ended.err) is (number == signal.SIGINT)
