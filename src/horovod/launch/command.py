"""``horovodrun``: reads the command line, runs the job, reports, and returns the exit code."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from horovod import config
from horovod._version import HOROVOD_VERSION, __version__
from horovod.cgroups import oom_kills, usable_cores
from horovod.errors import LaunchError
from horovod.launch.allocation import allocated_slots
from horovod.launch.assemble import Assembly, assemble, choose_hosts, interface_settings, named_hosts
from horovod.launch.console import open_standard_files, own_sinks, runnable, with_own_python
from horovod.launch.flags import Options, UsageError, parse_flags
from horovod.launch.mpi import has_mpirun, mpi_plan
from horovod.launch.plan import LaunchRequest
from horovod.launch.report import Outcome, alone_text, exit_code, report, trains_together
from horovod.launch.signals import ToldToEnd, held_back, told_to_end, wanted_signals
from horovod.launch.ssh import Access
from horovod.launch.supervise import FixedJob
from horovod.phrases import discard_output, show_any_text
from horovod.world import LOGIN_NODE

if TYPE_CHECKING:
    from horovod.launch.elastic_assembly import ElasticAssembly

__all__ = ["main"]

_MOST_PER_CORE = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, with the arguments of this process when omitted.

    Returns:
        0 when all ranks ended well, 2 for a wrong command line, else the exit code of the first rank that failed
        (128 + n for signal n), or 128 + n when signal n ended the launcher.
    """
    open_standard_files()
    show_any_text(sys.stdout)
    try:
        with told_to_end():
            words = sys.argv[1:] if argv is None else argv
            options = parse_flags(
                words, f"khorovod {__version__} (API of Horovod {HOROVOD_VERSION})", lambda: allocated_slots(os.environ)
            )
            if options.check_build:
                from horovod.launch.build_info import check_build

                return _print(check_build())
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
    except ToldToEnd as told:
        _say(told.text)
        return 128 + told.number
    try:
        return _run(options, assembly) if isinstance(assembly, Assembly) else _run_elastic(options, assembly)
    finally:
        assembly.close()


def _assemble(options: Options) -> Assembly | ElasticAssembly:
    _check_place(options)
    if (
        not (options.controller or options.hosts or options.hostfile)
        and "LSB_JOBID" in os.environ
        and shutil.which("jsrun")
    ):
        _say("LSF with jsrun, which starts the ranks; name hosts with -H to start them without it")
        options = replace(options, controller="jsrun")
    has_script = options.elastic is not None and bool(options.elastic.script)
    if options.check:
        python = "python3" if options.python else sys.executable  # agents put the folder of their Python in front
        options = replace(options, command=(python, "-m", "horovod.bench.check"), elastic=None)
    chosen = choose_hosts(options.hosts, options.hostfile, options.num_proc, has_script, one_each=options.check)
    options, where = replace(options, num_proc=chosen.num_proc), chosen.places
    if not options.command:
        raise UsageError("no command: say what to run, such as horovodrun -np 2 python train.py")
    is_ours = options.controller not in ("mpi", "jsrun")
    if chosen.note and is_ours:
        _say(chosen.note)
    cores = usable_cores()
    is_here = not (options.hosts or options.hostfile or chosen.note)
    if chosen.num_proc > _MOST_PER_CORE * cores and is_here and not options.oversubscribe:
        raise UsageError(
            f"-np {chosen.num_proc} is more than {_MOST_PER_CORE} ranks for each of {cores} cores; if that is what "
            f"you want, add --oversubscribe"
        )
    environ = with_own_python(os.environ)
    is_one_host = all(place.is_here for place in where) and options.elastic is None
    request = LaunchRequest(
        command=runnable(options.command, environ["PATH"], is_needed=any(place.is_here for place in where)),
        num_proc=chosen.num_proc,
        environ=environ,
        flags={**({} if is_one_host else interface_settings(options.interfaces, options.tcp)), **options.settings},
        file=options.file_settings,
        output_dir=options.output_dir,
        rotation=options.rotation,
        timestamps=options.timestamps,
    )
    access = Access(
        options.python or sys.executable, options.ssh_port, options.ssh_identity_file, interfaces=options.interfaces,
        starters=chosen.starters,
    )  # fmt: skip
    if options.controller == "mpi" and is_one_host and not has_mpirun(environ):
        _say("--mpi ignored: single host, and mpirun not found in PATH")
    elif options.controller in ("mpi", "jsrun"):
        plan = mpi_plan(request, options, named_hosts(options.hosts, options.hostfile), access, is_one_host)
        return Assembly(plan, {})
    if options.elastic is not None:
        # Jobs of a fixed size on one host need no ZeroMQ.
        with held_back():
            from horovod.launch.elastic_assembly import ElasticAssembly

        return ElasticAssembly(request, options.elastic, chosen.named, access)
    return assemble(request, where, access)


def _check_place(options: Options) -> None:
    """Refuse to run where another launcher must start the ranks, or has started this one several times."""
    if shutil.which("aprun") and options.controller != "jsrun":
        raise LaunchError(LOGIN_NODE)
    copies = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    is_named = options.hosts or options.hostfile or (options.elastic is not None and options.elastic.script)
    if copies != "1" and not (is_named or os.isatty(0)):  # in a shell of `srun --pty` it runs once
        raise UsageError(
            f"srun has started {copies} copies of horovodrun, and each would be a job of its own; write `srun "
            f"-n{copies} python train.py`, or horovodrun without srun; for {copies} jobs unset SLURM_STEP_NUM_TASKS"
        )


def _run_elastic(options: Options, assembly: ElasticAssembly) -> int:
    if options.verbose:
        _say(f"starting {options.num_proc} ranks: {' '.join(assembly.plan.command)}")
    try:
        outcome = assembly.run(own_sinks(), wanted_signals())
    except LaunchError as error:
        _say(f"error: {error}")
        return 1
    # More processes than -np run where hosts have room for them. One that came later, and had not begun, was no rank.
    have_met = any(ended.has_begun for ended in outcome.exits)
    alone = [] if outcome.code or have_met else _alone(assembly.plan.command, len(outcome.exits), outcome)
    for line in outcome.lines + alone:
        _say(line)
    return outcome.code


def _alone(command: tuple[str, ...], size: int, outcome: Outcome) -> list[str]:
    """Return a line about ranks that have ended well without a call of ``hvd.init()``, if there are any."""
    alone = sorted(ended.rank for ended in outcome.exits if ended.status == 0 and not ended.has_begun)
    return [alone_text(alone, size)] if alone and trains_together(command, size) else []


def _doctor(folder: Path) -> int:
    from horovod.timeline.doctor import examine

    try:
        os.scandir(folder).close()
    except OSError as error:
        raise UsageError(f"--doctor {folder}: {error.strerror}") from None
    lines, found = examine(folder)
    return _print("\n".join(lines)) or (0 if found else 2)


def _print(text: str) -> int:
    """Print the requested text; return 1 if it cannot be written."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has read enough, as `head` does
        discard_output()
    except OSError as error:
        discard_output()
        _say(f"error: the output cannot be written: {error.strerror}")
        return 1
    return 0


def _has_dumps(folder: Path) -> bool:
    from horovod.timeline.dumps import PATTERN

    return any(folder.glob(PATTERN))


def _run(options: Options, assembly: Assembly) -> int:
    plan = assembly.plan
    hosts = list(dict.fromkeys(plan.host_of(rank) for rank in range(plan.size)))
    is_mpi = not plan.ranks[0]
    if options.far and not assembly.reaches_others and not is_mpi:
        _say(f"ignored on a single host: {', '.join(options.far)}")
    for note in plan.notes:
        _say(note)
    if options.verbose and is_mpi:
        _say(f"running {shlex.join(plan.command)}")
    elif options.verbose:
        on = ", ".join(hosts)
        _say(f"starting {plan.size} rank{'s' * (plan.size != 1)} on {on}: {' '.join(plan.command)}")
    sinks = own_sinks()
    before = oom_kills()
    try:
        outcome = FixedJob(plan, sinks, assembly.jobs(), assembly.ended).carry_out(wanted_signals(), None)
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
        lines.append(f"to see what each rank did last: horovodrun --doctor {folder}")
    for line in lines or _alone(plan.command, plan.size, outcome):
        _say(line)
    return exit_code(outcome)


def _say(line: str) -> None:
    try:
        print(f"horovodrun: {line}" if not line.startswith(" ") else line, file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)  # it has no reader; the exit code still reports the result
