"""horovodrun with real processes, when something dies: who is named, and that nothing is left."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HOROVODRUN, PATIENT, TIMEOUT_S, horovodrun, started

PY = sys.executable
# Rank 1 fails in the way that is asked for, the others wait for ever.
FAIL = """
import ctypes, os, signal, sys
if os.environ["HOROVOD_RANK"] == "1":
    for i in range(30):
        print("line", i, file=sys.stderr)
    {how}
signal.pause()
"""
# Prints its process id and that of a child, which is in a session of its own and ignores polite requests.
STUBBORN = """
import os, signal, subprocess, sys
child = "import os, signal; os.setsid(); signal.signal(15, signal.SIG_IGN); print('x', flush=True); signal.pause()"
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print("up", os.getpid(), process.pid, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    return str(path)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("sys.exit(3)", 3, "failed with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("ctypes.string_at(0)", 139, "was killed by SIGSEGV"),
    ],
)
def test_first_failure_is_named_and_the_others_are_ended(how: str, code: int, said: str) -> None:
    ended = horovodrun("-np", "3", PY, "-c", FAIL.format(how=how))
    assert ended.code == code
    lines = [line for line in ended.err.splitlines() if not line.startswith("[1]<stderr>:")]
    assert lines[0].startswith(f"horovodrun: rank 1 on {os.uname().nodename} (pid ")
    assert said in lines[0]
    assert lines[1] == "horovodrun: the last lines of rank 1's stderr:"
    assert len(lines) == 2 + 20 + 2
    assert "    line 29" in lines
    assert "    line 9" not in lines
    assert [line.split(" (")[0] for line in lines[-2:]] == ["horovodrun: rank 0", "horovodrun: rank 2"]
    assert all("ended by horovodrun with SIGTERM" in line for line in lines[-2:])


def test_the_cause_is_named_not_those_who_failed_of_it(tmp_path: Path) -> None:
    """Ranks that see rank 2 die exit at once, as the engine makes them; rank 2 died first and must be named."""
    script = """
import os, select, sys
rank = int(os.environ["HOROVOD_RANK"])
if rank == 2:
    pids = [open(f"fifo.{r}", "w") for r in (0, 1, 3)]
    for f in pids:
        f.write(f"{os.getpid()}\\n"); f.flush()
    for f in pids:
        open(f.name + ".back").read()
    os.kill(os.getpid(), 9)
fd = os.pidfd_open(int(open(f"fifo.{rank}").readline()))
open(f"fifo.{rank}.back", "w").close()
select.select([fd], [], [])
sys.exit(1)
"""
    for r in (0, 1, 3):
        os.mkfifo(tmp_path / f"fifo.{r}")
        os.mkfifo(tmp_path / f"fifo.{r}.back")
    ended = horovodrun("-np", "4", PY, "-c", script, cwd=tmp_path, program=PATIENT)
    assert ended.code == 137
    assert "rank 2 on" in ended.err.splitlines()[0]
    assert ended.err.count("failed with exit code 1") == 3


# One rank ends where the others call init(), which would wait for it for a day.
ABSENT = """
import sys, horovod.numpy as hvd, os
rank, meets = int(os.environ["HOROVOD_RANK"]), int(sys.argv[2])
for _ in range(meets):
    hvd.init()
    hvd.shutdown()
if rank == int(sys.argv[1]):
    sys.exit(0)
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("victim", "meets"), [(0, 0), (2, 0), (1, 2)])
def test_nobody_waits_for_a_rank_that_ended_before_init(victim: int, meets: int) -> None:
    ended = horovodrun("-np", "3", "--start-timeout", "86400", PY, "-c", ABSENT, str(victim), str(meets))
    assert ended.code == 0, ended.err
    assert len(ended.lines) == 2
    for line in ended.lines:
        assert "ended with exit code 0 before its init() was done" in line
    # The rank that hears of it first ends, too, and may be what the other one hears of.
    assert any(f"PeerLostError rank {victim} (pid " in line for line in ended.lines)


def test_all_fail_at_once() -> None:
    ended = horovodrun("-np", "3", "bash", "-c", "exit 5", program=PATIENT)
    assert ended.code == 5
    assert ended.err.count("failed with exit code 5") == 3


def test_a_shell_around_a_killed_command() -> None:
    ended = horovodrun("-np", "1", "bash", "-c", f"{PY} -c 'import os; os.kill(os.getpid(), 9)'; exit $?")
    assert ended.code == 137
    assert "failed with exit code 137 (SIGKILL in a command that it ran)" in ended.err


@pytest.mark.parametrize("written", [False, True])
def test_the_doctor_is_named_where_there_is_something_to_read(tmp_path: Path, written: bool) -> None:
    script = "mkdir -p dump; touch dump/rank-1.json; exit 3" if written else "exit 3"
    ended = horovodrun("-np", "2", "sh", "-c", script, cwd=tmp_path, HOROVOD_FLIGHT_RECORDER_DIR="dump")
    assert ended.code == 3
    assert ("horovodrun --doctor dump" in ended.err) == written


def test_command_that_cannot_be_run_after_all(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    ended = horovodrun("-np", "2", str(script))
    assert ended.code == 127
    assert f"cannot run '{script}': No such file or directory" in ended.err


@pytest.mark.slow
def test_who_ignores_sigterm_is_killed_with_all_its_children(script: str) -> None:
    with started("-np", "2", PY, script, "stubborn", ranks=2, program=PATIENT) as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.still_alive() == []
        ended = running.end()
    assert ended.code == 143
    assert ended.err == "horovodrun: SIGTERM received; ended 2 of 2 ranks, nothing is left running\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_horovodrun_end_all(number: signal.Signals, script: str) -> None:
    with started("-np", "2", "bash", "-c", f"{PY} {script}; true", ranks=2) as running:
        running.process.send_signal(number)
        assert running.still_alive() == []
        assert running.end().code == 128 + number


def test_a_second_ctrl_c_kills_at_once(script: str) -> None:
    with started("-np", "2", PY, script, "stubborn", ranks=2) as running:
        # Two equal signals that come together are one to the kernel, so the second is another one.
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGTERM)
        assert running.still_alive() == []
        ended = running.end()
    assert ended.code in (130, 143)
    assert ended.err.count("SIGKILL") == 0


def test_killing_horovodrun_leaves_nothing(script: str) -> None:
    with started("-np", "2", "bash", "-c", f"{PY} {script} stubborn; true", ranks=2) as running:
        running.process.kill()
        assert running.still_alive() == []


# Prints its process id and that of a daemon: forked twice, in a session of its own, without any environment.
DAEMON = """
import os, signal, subprocess, sys
daemon = "import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
twice = f'setsid env -i {sys.executable} -c "$0" & exec 1>&-'
process = subprocess.Popen(["sh", "-c", twice, daemon], stdout=subprocess.PIPE, text=True)
print("up", os.getpid(), process.stdout.readline(), flush=True)
signal.pause()
"""


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "whom", ["guard", "keeper", "guard and keeper", "horovodrun and keeper", "horovodrun and guard"]
)
def test_killing_those_who_watch_leaves_nothing(whom: str) -> None:
    # When both are killed, a daemon is found by its environment.
    daemon = DAEMON.replace("env -i ", "") if whom == "guard and keeper" else DAEMON
    with started("-np", "2", PY, "-c", daemon, ranks=2) as running:
        assert len(running.pidfds) == 4
        (guard,) = _children(running.process.pid)
        (keeper,) = _children(guard)
        watching = {"horovodrun": running.process.pid, "keeper": keeper, "guard": guard}
        # Of those only the guard may run before it is killed: the kernel continues it when horovodrun is killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for name, pid in watching.items():
                if name in whom:
                    os.kill(pid, number)
        assert running.still_alive() == []
        ended = running.end()
    if "horovodrun" not in whom:
        assert ended.code == 1
        assert "the process that watches the ranks was killed" in ended.err


def test_a_guard_that_is_killed_after_horovodrun_leaves_the_keeper_to_end_the_job() -> None:
    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    with started("-np", "2", PY, "-c", DAEMON, ranks=2) as running:
        (guard,) = _children(running.process.pid)
        (keeper,) = _children(guard)
        os.kill(keeper, signal.SIGSTOP)
        while not is_stopped(keeper):
            pass
        running.process.kill()
        while is_stopped(keeper):
            pass
        os.kill(guard, signal.SIGKILL)
        assert running.still_alive() == []


@pytest.mark.parametrize(
    ("stopped", "killed"),
    [("keeper", "horovodrun"), ("guard", "horovodrun"), ("guard and keeper", "horovodrun"), ("keeper", "guard")],
)
def test_stopping_those_who_watch_keeps_nothing(stopped: str, killed: str) -> None:
    with started("-np", "2", PY, "-c", DAEMON, ranks=2) as running:
        assert len(running.pidfds) == 4
        (guard,) = _children(running.process.pid)
        (keeper,) = _children(guard)
        watching = {"horovodrun": running.process.pid, "keeper": keeper, "guard": guard}
        running.pidfds |= {os.pidfd_open(pid): pid for pid in (guard, keeper)}
        for name, pid in watching.items():
            if name in stopped:
                os.kill(pid, signal.SIGSTOP)
        os.kill(watching[killed], signal.SIGKILL)
        assert running.still_alive() == []


def test_what_a_rank_leaves_behind_is_ended_when_the_job_is_over(script: str) -> None:
    leave = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, text=True)\n"
        "print(p.stdout.readline(), end='', flush=True)\n"
        "import os; os._exit(0)"
    )
    with started("-np", "2", PY, "-c", leave, script, "stubborn", ranks=2) as running:
        assert running.still_alive() == []
        assert running.end().code == 0


# A keeper that gets to run every ten seconds only; what the ranks left behind ignores polite requests.
STARVED = """
import itertools, os, socket, subprocess, sys
from types import SimpleNamespace
from horovod.launch import keeper
clock = itertools.count(0, 10)
keeper.time = SimpleNamespace(monotonic=lambda: next(clock))
command = [sys.executable, sys.argv[1], "stubborn"]
child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child.stdout.readline()
wake, _ = os.pipe()
os.set_blocking(wake, False)
keeper.Keeper(socket.socketpair()[0], {})._sweep(wake)
left = keeper.descendants(os.getpid())
print(left)
for pid in left:
    os.kill(pid, 9)
"""


def test_a_keeper_that_hardly_gets_to_run_kills_all_the_same(script: str) -> None:
    done = subprocess.run([PY, "-c", STARVED, script], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == "[]\n", done.stderr


# A keeper that sends SIGTERM before the rank that it has forked has done anything.
HASTY = """
import os, signal, socket
from horovod.launch import keeper
for number in keeper.OWN_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
sent, sent_end = os.pipe()
os.setsid = lambda: os.read(sent, 1)
plan = {"command": ["true"], "env": dict(os.environ), "exits": [os.memfd_create("exits"), "EXITS"]}
own = keeper.Keeper(socket.socketpair()[0], plan)
own._start({"start": 0, "slot": 0, "env": {}, "stdin": False}, [1, 2])
[pid] = own._running
os.kill(pid, signal.SIGTERM)
os.write(sent_end, b"!")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_rank_that_is_being_started_does_not_miss_sigterm() -> None:
    done = subprocess.run([PY, "-c", HASTY], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr


def test_ctrl_c_in_a_terminal_reaches_the_launcher_only() -> None:
    """A rank that hears of Ctrl-C itself would say so."""
    rank = (
        "import signal\n"
        "try:\n"
        "    print('up', flush=True); signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('heard')"
    )
    # pty.fork() would do, but not in a process with threads; and any test may have loaded what starts some.
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    terminal, theirs = pty.openpty()
    launcher = [PY, "-c", take, *HOROVODRUN, "-np", "2", PY, "-c", rank]
    process = subprocess.Popen(launcher, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    while seen.count(b"up") < 2:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 1024):
            seen += chunk
    except OSError:  # the terminal's last user has gone
        pass
    code = process.wait()
    os.close(terminal)
    assert code == 130
    assert b"SIGINT received" in seen
    assert b"heard" not in seen


def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    # Nobody ends before all are about to.
    script.write_text(
        "import os, sys\nopen(f'here{os.environ[\"HOROVOD_RANK\"]}', 'w').close()\n"
        "while len([n for n in os.listdir() if n.startswith('here')]) < 3: pass\nprint(undefined)\n"
    )
    ended = horovodrun("-np", "3", PY, "s.py", program=PATIENT, cwd=tmp_path)
    assert ended.err.count("<stderr>:Traceback") == ended.err.count("<stderr>:NameError") == 1
    [line] = [line for line in ended.err.splitlines() if "the same traceback as rank" in line]
    assert line.startswith("horovodrun: ranks ")
    assert "the last lines of" not in ended.err
