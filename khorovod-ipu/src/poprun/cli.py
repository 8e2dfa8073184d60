"""``poprun``: divides replicas among instances, and starts them as khorovod ranks on this or several hosts."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod.cgroups import usable_cores
from horovod.errors import LaunchError
from horovod.launch.assemble import Assembly, assemble, interface_settings
from horovod.launch.console import open_standard_files, own_sinks, runnable, with_own_python
from horovod.launch.hosts import HostSlots, Place, is_this_host, parse_hostfile, place
from horovod.launch.plan import Display, LaunchPlan, LaunchRequest
from horovod.launch.report import exit_code, report
from horovod.launch.signals import wanted_signals
from horovod.launch.ssh import Access
from horovod.launch.supervise import FixedJob
from poprun import bind
from poprun.flags import CommandLine, CommandLineError, help_text, parse, read_config, write_config
from poprun.log import new_log
from poprun.mpi_arguments import MpiArguments, read_arguments
from poprun.networks import addresses_here, interfaces_of
from poprun.topology import JobTopology, divide, expand_hosts, instance_variables, table
from poprun.version import version_text

__all__ = ["main"]


@dataclass(frozen=True)
class _Job:
    """The job to run."""

    line: CommandLine
    topology: JobTopology
    mpi: MpiArguments
    log: logging.Logger


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; those of this process when omitted.

    Returns:
        0 if all instances succeeded, 2 for a wrong command line, else the exit code of the first instance that
        failed (128 + n for signal n), or 128 + n when signal n ended poprun.
    """
    open_standard_files()
    log = new_log(0)
    try:
        line = parse(sys.argv[1:] if argv is None else argv)
        log = new_log(line.verbosity)
        if line.wants_help or line.wants_version:
            print(help_text() if line.wants_help else version_text(line["version-format"]))
            return 0
        job = _prepare(line, log)
        if not line.command:
            return 0
        if line["dry-run"]:
            return _show(job)
        assembly = _assemble(job)
    except ValueError as error:
        log.error(str(error))
        return 2
    except LaunchError as error:
        log.error(str(error))
        return 1
    except KeyboardInterrupt:
        log.error("SIGINT received; no instance was started")
        return 128 + signal.SIGINT
    try:
        return _run(job, assembly)
    finally:
        assembly.close()


def _prepare(line: CommandLine, log: logging.Logger) -> _Job:
    """Check settings, topology and files."""
    if line["import-config"]:
        line.given = {**read_config(line["import-config"]), **line.given}
    if line.given.get("host") and line.given.get("hostfile"):
        raise CommandLineError("give --host or --hostfile, not both")
    topology = divide(_hosts(line), line["num-replicas"], line["num-instances"], line["num-ilds"])
    shown = line["only-output-from-instance"]
    if shown is not None and shown >= topology.instances:
        raise CommandLineError(
            f"--only-output-from-instance={shown}: there are instances 0 to {topology.instances - 1}"
        )
    mpi = read_arguments(f"{line['mpi-global-args']} {line['mpi-local-args']}", os.environ)
    if line["export-config"]:
        write_config(line["export-config"], line.given, line["overwrite-config"])
        log.info(f"settings written to {line['export-config']}")
    elif not line.command and not line["print-topology"]:
        raise CommandLineError("no program is given. Example: poprun --num-replicas=2 --num-instances=2 python main.py")
    if line["print-topology"]:
        print(table(topology), flush=True)
    else:
        log.debug("topology:\n" + table(topology))
    if idle := line.idle():
        log.warning(f"without effect: {', '.join(idle)}")
    if mpi.ignored:
        log.warning(
            f"instances are not started by mpirun; of its arguments these have no effect: {', '.join(mpi.ignored)}"
        )
    if topology.instances_each > usable_cores():
        log.warning(
            f"{topology.instances_each} instances on each host share {usable_cores()} cores of this one: fewer "
            f"instances with more replicas each may be faster"
        )
    return _Job(line, topology, mpi, log)


def _hosts(line: CommandLine) -> list[str]:
    if line["host"]:
        names = expand_hosts(line["host"])
    elif line["hostfile"]:
        path = line["hostfile"]
        try:
            names = [host.name for host in parse_hostfile(Path(path).read_text(encoding="utf-8"), path)]
        except OSError as error:
            raise CommandLineError(f"--hostfile {path}: {error.strerror}") from error
    else:
        return ["localhost"]
    here = [name for name in names if len(names) > 1 and is_this_host(name)]
    if len(here) > 1:
        raise CommandLineError(
            f"{' and '.join(here)} are one machine, this one: name it once, and raise --num-instances"
        )
    return names


def _command(job: _Job, path: str, is_needed: bool) -> tuple[str, ...]:
    command = runnable(job.line.command, path, is_needed)
    return (sys.executable, "-m", bind.__name__, *command) if job.line["numa-aware"] else command


def _assemble(job: _Job) -> Assembly:
    topology, mpi = job.topology, job.mpi
    if topology.hosts == ("localhost",):
        where = [Place("localhost", topology.instances, True)]
    else:
        hosts = [HostSlots(name, topology.instances_each) for name in topology.hosts]
        where = place(hosts, topology.instances, is_this_host)
    is_one_host = all(there.is_here for there in where)
    environ = with_own_python({k: v for k, v in os.environ.items() if not k.startswith("POPDIST_")})
    networks = [*([job.line["host-subnet"]] if job.line["host-subnet"] else []), *mpi.networks]
    interfaces = interfaces_of(networks, addresses_here()) if networks and not is_one_host else ()
    if job.line["executable-cache-path"]:
        environ["POPDIST_EXECUTABLE_CACHE_PATH"] = job.line["executable-cache-path"]
    request = LaunchRequest(
        command=_command(job, environ["PATH"], is_needed=any(there.is_here for there in where)),
        num_proc=topology.instances,
        environ=environ,
        flags={**interface_settings(interfaces), **mpi.environ},
        output_dir=mpi.output_dir,
        timestamps=mpi.timestamps,
    )
    return assemble(request, where, Access(sys.executable, interfaces=interfaces))


def _with_division(job: _Job, plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with the variables of each instance, and the labels of its output."""
    ipus, shown = job.line["ipus-per-replica"], job.line["only-output-from-instance"]
    own = [{**rank, **instance_variables(job.topology, i, ipus)} for i, rank in enumerate(plan.ranks)]
    hidden = frozenset() if shown is None else frozenset(range(plan.size)) - {shown}
    display = Display("poprun", "instance", "[1,{rank}]<{stream}>:", is_always=True, hidden=hidden)
    return replace(plan, ranks=tuple(own), display=display)


def _show(job: _Job) -> int:
    """Print the plan for ``--dry-run``."""
    words = _command(job, os.environ.get("PATH", os.defpath), is_needed=False)
    for index in range(job.topology.instances):
        host = job.topology.hosts[index // job.topology.instances_each]
        variables = instance_variables(job.topology, index, job.line["ipus-per-replica"]) | job.mpi.environ
        print(f"{host}: {' '.join(f'{k}={shlex.quote(v)}' for k, v in variables.items())} {shlex.join(words)}")
    return 0


def _run(job: _Job, assembly: Assembly) -> int:
    plan, log = _with_division(job, assembly.plan), job.log
    for note in plan.notes:
        log.info(note)
    for index, rank in enumerate(plan.ranks):
        own = " ".join(f"{k}={v}" for k, v in rank.items() if k.startswith("POPDIST_"))
        log.debug(f"instance {index} on {plan.host_of(index)}: {own}")
    log.info("Running command: " + " ".join(f"'{word}'" for word in plan.command))
    log.info(f"Waiting for {plan.size} instance{'s' * (plan.size != 1)}")
    try:
        ranks = FixedJob(plan, own_sinks(), assembly.jobs(plan), assembly.ended)
        outcome = ranks.carry_out(wanted_signals(), None)
    except LaunchError as error:
        log.error(str(error))
        return 1
    for text in report(plan, outcome):
        log.error(text)
    log.info(f"all instances ended; exit code {exit_code(outcome)}")
    return exit_code(outcome)


if __name__ == "__main__":
    sys.exit(main())
