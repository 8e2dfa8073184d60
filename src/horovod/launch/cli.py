"""``horovodrun``: reads the command line, runs the job, reports, and says it all with the exit code."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod import config
from horovod._version import __version__
from horovod.cgroups import oom_kills, usable_cores
from horovod.errors import LaunchError
from horovod.launch.flags import Options, UsageError, parse_flags
from horovod.launch.hosts import Host, local_slots, parse_hostfile, parse_hosts
from horovod.launch.machine import is_this_host
from horovod.launch.output import FileScreen, Screen
from horovod.launch.plan import LaunchPlan, Wish, make_plan
from horovod.launch.report import exit_code, report
from horovod.launch.supervise import supervise
from horovod.phrases import show_any_text

__all__ = ["check_hosts", "main"]

_MOST_PER_CORE = 64
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command.

    Args:
        argv: arguments without the program's name; those of this process when omitted.

    Returns:
        0 when all ranks ended well, 2 for a wrong command line, else the exit code of the first rank that failed
        (128 + n for signal n), or 128 + n when signal n ended the launcher.
    """
    _open_standard_files()
    show_any_text(sys.stdout)
    try:
        options = parse_flags(sys.argv[1:] if argv is None else argv, f"khorovod {__version__} (Horovod API)")
        if options.check_build:
            from horovod.launch.build_info import check_build

            print(check_build())
            return 0
        if options.doctor:
            return _doctor(Path(options.doctor))
        plan = _plan(options)
    except SystemExit as done:  # --help, --version
        return int(done.code or 0)
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    if options.unused:
        _say(f"on one host without effect: {', '.join(options.unused)}")
    for note in plan.notes:
        _say(note)
    if options.verbose:
        _say(f"starting {plan.size} rank{'s' * (plan.size != 1)} on {plan.hostname}: {' '.join(plan.command)}")
    return _run(plan)


def _plan(options: Options) -> LaunchPlan:
    if options.num_proc is None:
        raise UsageError("-np is missing: say how many processes to start, such as horovodrun -np 2 python train.py")
    if not options.command:
        raise UsageError("no command: say what to run, such as horovodrun -np 2 python train.py")
    check_hosts(options.hosts, options.hostfile, options.num_proc)
    cores = usable_cores()
    if options.num_proc > _MOST_PER_CORE * cores and not (options.oversubscribe or options.hosts or options.hostfile):
        raise UsageError(
            f"-np {options.num_proc} is more than {_MOST_PER_CORE} ranks for each of {cores} cores; if that is what "
            f"you want, add --oversubscribe"
        )
    environ = _with_own_python(os.environ)
    plan = make_plan(
        Wish(
            command=_runnable(options.command, environ["PATH"]),
            num_proc=options.num_proc,
            environ=environ,
            job=secrets.token_hex(16),
            key=secrets.token_hex(32),
            hostname=os.uname().nodename,
            cores=cores,
            flags=options.settings,
            file=options.file_settings,
            output_dir=options.output_dir,
            timestamps=options.timestamps,
        )
    )
    config.load(plan.environ)  # a wrong value is one error here rather than one on every rank
    return plan


def _doctor(folder: Path) -> int:
    from horovod.timeline.doctor import examine

    lines, found = examine(folder)
    print("\n".join(lines))
    return 0 if found else 2


def _has_dumps(folder: Path) -> bool:
    from horovod.timeline.dumps import PATTERN

    return any(folder.glob(PATTERN))


def check_hosts(hosts: str, hostfile: str, num_proc: int) -> None:
    """Check that the ranks fit on the hosts that the user named, if any.

    Args:
        hosts: value of ``-H``, or empty.
        hostfile: path of a host file, or empty.
        num_proc: number of ranks.

    Raises:
        ValueError: they do not fit, a host is not this machine, or the text is no list of hosts.
    """
    parsed: list[Host] = []
    if hosts:
        parsed = parse_hosts(hosts)
    elif hostfile:
        try:
            parsed = parse_hostfile(Path(hostfile).read_text(encoding="utf-8"), hostfile)
        except OSError as error:
            raise UsageError(f"-hostfile {hostfile}: {error.strerror}") from error
    if num_proc < 1:
        raise UsageError(f"-np must be at least 1; received {num_proc}")
    if parsed:
        local_slots(parsed, num_proc, is_this_host)


def _with_own_python(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as if the virtual environment that horovodrun is installed in were activated, unless one is."""
    path = environ.get("PATH", os.defpath)
    own = str(Path(sys.prefix) / "bin")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in environ and own not in path.split(os.pathsep):
        path = own + os.pathsep + path
    return {**environ, "PATH": path}


def _runnable(command: tuple[str, ...], path: str) -> tuple[str, ...]:
    """The command, with Python in front of a script that cannot be run by itself."""
    name = command[0]
    if shutil.which(name, path=path):
        return command
    if name.endswith(".py") and Path(name).is_file():
        return (shutil.which("python", path=path) or sys.executable, *command)
    what = "is not executable" if Path(name).is_file() else "was not found"
    raise UsageError(f"the command {name!r} {what}")


def _run(plan: LaunchPlan) -> int:
    screens = _screens()
    before = oom_kills()
    try:
        outcome = supervise(plan, screens, signals=_wanted_signals())
    except LaunchError as error:
        _say(f"error: {error}")
        return 1
    lines = report(plan, outcome, oom_kills() - before if before >= 0 else 0)
    folder = config.load(plan.environ).flight_recorder_dir
    if folder and outcome.first_failure is not None and not outcome.interrupted and _has_dumps(Path(folder)):
        lines.append(f"what the ranks were doing: horovodrun --doctor {folder}")
    for line in lines:
        _say(line)
    return exit_code(outcome)


def _screens() -> tuple[Screen, Screen]:
    """Standard output and error; one screen when both are the same terminal or pipe."""
    out = FileScreen(1)
    a, b = os.fstat(1), os.fstat(2)
    return out, out if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) else FileScreen(2)


def _open_standard_files() -> None:
    """Give closed standard files a number of their own, else a pipe of ours would become somebody's output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _wanted_signals() -> list[signal.Signals]:
    """Hanging up is ignored under nohup, and stays so; Ctrl-Z only means us where a shell controls jobs."""
    return [s for s in _SIGNALS if s == signal.SIGINT or signal.getsignal(s) != signal.SIG_IGN]


def _say(line: str) -> None:
    try:
        print(f"horovodrun: {line}" if not line.startswith(" ") else line, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody listens any more; the exit code still speaks


if __name__ == "__main__":
    sys.exit(main())
