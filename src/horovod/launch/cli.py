"""``horovodrun``: reads the command line, runs the job, reports, and says it all with the exit code."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod import config
from horovod._version import __version__
from horovod.cgroups import oom_kills, usable_cores
from horovod.errors import LaunchError
from horovod.launch.assemble import Assembly, assemble, interface_settings, named_hosts, places
from horovod.launch.flags import Options, UsageError, parse_flags
from horovod.launch.mpi_run import mpi_plan
from horovod.launch.muster import Muster
from horovod.launch.output import FileSink, OutputSink
from horovod.launch.plan import LaunchRequest
from horovod.launch.report import exit_code, report
from horovod.launch.ssh import Access
from horovod.launch.supervise import supervise
from horovod.phrases import show_any_text

__all__ = ["main"]

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
        assembly = _assemble(options)
    except SystemExit as done:  # --help, --version
        return int(done.code or 0)
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    except LaunchError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("SIGINT received; no rank was started")
        return 128 + signal.SIGINT
    try:
        return _run(options, assembly)
    finally:
        assembly.close()


def _assemble(options: Options) -> Assembly:
    if options.num_proc is None:
        raise UsageError("-np is missing: say how many processes to start, such as horovodrun -np 2 python train.py")
    if not options.command:
        raise UsageError("no command: say what to run, such as horovodrun -np 2 python train.py")
    where = places(options.hosts, options.hostfile, options.num_proc)
    cores = usable_cores()
    if options.num_proc > _MOST_PER_CORE * cores and not (options.oversubscribe or options.hosts or options.hostfile):
        raise UsageError(
            f"-np {options.num_proc} is more than {_MOST_PER_CORE} ranks for each of {cores} cores; if that is what "
            f"you want, add --oversubscribe"
        )
    environ = _with_own_python(os.environ)
    is_one_host = all(place.is_here for place in where)
    request = LaunchRequest(
        command=_runnable(options.command, environ["PATH"], is_needed=any(place.is_here for place in where)),
        num_proc=options.num_proc,
        environ=environ,
        job=secrets.token_hex(16),
        key=secrets.token_hex(32),
        hostname=os.uname().nodename,
        cores=cores,
        flags={**({} if is_one_host else interface_settings(options.interfaces, options.tcp)), **options.settings},
        file=options.file_settings,
        output_dir=options.output_dir,
        timestamps=options.timestamps,
    )
    access = Access(
        options.python or sys.executable, options.ssh_port, options.ssh_identity_file, interfaces=options.interfaces
    )
    if options.controller in ("mpi", "jsrun") and not (is_one_host and options.controller == "mpi"):
        plan = mpi_plan(request, options, named_hosts(options.hosts, options.hostfile), access)
        return Assembly(plan, Muster({}))
    return assemble(request, where, access)


def _doctor(folder: Path) -> int:
    from horovod.timeline.doctor import examine

    lines, found = examine(folder)
    print("\n".join(lines))
    return 0 if found else 2


def _has_dumps(folder: Path) -> bool:
    from horovod.timeline.dumps import PATTERN

    return any(folder.glob(PATTERN))


def _with_own_python(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as if the virtual environment that horovodrun is installed in were activated, unless one is."""
    path = environ.get("PATH", os.defpath)
    own = str(Path(sys.prefix) / "bin")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in environ and own not in path.split(os.pathsep):
        path = own + os.pathsep + path
    return {**environ, "PATH": path}


def _runnable(command: tuple[str, ...], path: str, is_needed: bool) -> tuple[str, ...]:
    """The command, with Python in front of a script that cannot be run by itself."""
    name = command[0]
    if shutil.which(name, path=path):
        return command
    if name.endswith(".py") and Path(name).is_file():
        return (shutil.which("python", path=path) or sys.executable, *command)
    if not is_needed:  # other hosts look for themselves
        return command
    what = "is not executable" if Path(name).is_file() else "was not found"
    raise UsageError(f"the command {name!r} {what}")


def _run(options: Options, assembly: Assembly) -> int:
    plan = assembly.plan
    hosts = list(dict.fromkeys(plan.host_of(rank) for rank in range(plan.size)))
    if options.far and not plan.counts:
        _say(f"on one host without effect: {', '.join(options.far)}")
    for note in plan.notes:
        _say(note)
    is_mpi = not plan.ranks[0]
    if options.verbose and is_mpi:
        _say(f"running {shlex.join(plan.command)}")
    elif options.verbose:
        on = ", ".join(hosts)
        _say(f"starting {plan.size} rank{'s' * (plan.size != 1)} on {on}: {' '.join(plan.command)}")
    sinks = _sinks()
    before = oom_kills()
    try:
        outcome = supervise(plan, sinks, signals=_wanted_signals(), jobs=assembly.jobs())
    except LaunchError as error:
        _say(f"error: {error}")
        return 1
    first = outcome.first_failure
    is_here = first is not None and plan.host_of(first.rank) == os.uname().nodename
    if is_mpi and first is not None and not outcome.interrupted:
        _say(f"{Path(plan.command[0]).name} failed with exit code {exit_code(outcome)}")
        return exit_code(outcome)
    lines = report(plan, outcome, oom_kills() - before if before >= 0 and is_here else 0)
    folder = config.load(plan.environ).flight_recorder_dir
    if folder and first is not None and not outcome.interrupted and _has_dumps(Path(folder)):
        lines.append(f"what the ranks were doing: horovodrun --doctor {folder}")
    for line in lines:
        _say(line)
    return exit_code(outcome)


def _sinks() -> tuple[OutputSink, OutputSink]:
    """Standard output and error; one sink when both are the same terminal or pipe."""
    out = FileSink(1)
    a, b = os.fstat(1), os.fstat(2)
    return out, out if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) else FileSink(2)


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
