"""``horovod.run``: calls a function on N processes and collects its results."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from horovod.cgroups import oom_kills
from horovod.errors import LaunchError
from horovod.launch import task
from horovod.launch.assemble import Assembly, assemble, choose_hosts, interface_names, interface_settings
from horovod.launch.call import elastic_results_of, pack, results_of, sink_of
from horovod.launch.elastic_options import ElasticOptions, argument_options
from horovod.launch.hosts import HostSlots, Place
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchRequest
from horovod.launch.ssh import Access
from horovod.launch.supervise import FixedJob

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Any = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` new processes that train together, here or on other hosts.

    Works from scripts, notebooks and interactive sessions. Output of the ranks appears here, line by line.

    Args:
        func: the function, which may be a lambda or closure; it must call ``hvd.init()``.
        args: its arguments.
        kwargs: its named arguments.
        num_proc: number of processes; 1 when omitted.
        min_num_proc: fewest processes to go on with when one is lost; makes the job elastic.
        max_num_proc: most processes; ``num_proc`` when omitted, without limit with a script.
        slots: slots of a host for which the script prints no number; 1.
        reset_limit: maximum number of generations after the first one; then the job ends.
        cooldown_range: seconds until a host on which a process failed is used again, and their limit; ``(1, 600)``.
        hosts: hosts such as ``localhost:n`` or ``a:2,b:2``; when omitted, the hosts of the scheduler's allocation that
            this process is in, else this machine.
        hostfile: path of a file with lines ``host slots=n``.
        host_discovery_script: command that prints the hosts that may be used now, one ``host:slots`` a line.
        start_timeout: seconds for the checks of other hosts, and for ``init()`` to wait for other ranks; 600.
        ssh_port: port of sshd on other hosts.
        ssh_identity_file: private key for ssh.
        disable_cache: accepted; nothing is cached.
        output_filename: folder for ``rank.<n>/stdout`` and ``stderr``.
        verbose: more than 0 prints which ranks are started.
        use_gloo: accepted; ranks of one host use shared memory.
        use_mpi: accepted on one host, whose ranks use shared memory; other hosts need ``horovodrun --mpi``.
        mpi_args: accepted, without effect.
        network_interface: deprecated, as ``network_interfaces``.
        network_interfaces: interfaces that all hosts have, a list of names or ``"a,b"``; ranks talk over them.
        executable: Python of the ranks, on all hosts; the caller's when omitted.
        np: deprecated, as ``num_proc``.
        min_np: deprecated, as ``min_num_proc``.
        max_np: deprecated, as ``max_num_proc``.

    Returns:
        The return value of ``func`` on each rank, in rank order; of an elastic job, on the ranks of the last
        generation.

    Raises:
        ValueError: arguments that contradict each other, or that this version does not support.
        LaunchError: a rank failed; the message has its traceback, and ``__cause__`` its exception if that could be
            sent. Of an elastic job: too few ranks were left; the message has the causes, and the traceback of the last
            process that failed.
        KeyboardInterrupt: Ctrl-C; all ranks were ended before.

    Blocks until all ranks have ended.
    """
    old = {"np": np, "min_np": min_np, "max_np": max_np, "network_interface": network_interface}
    for name in (name for name, value in old.items() if value is not None):
        new = name.replace("np", "num_proc") if "np" in name else "network_interfaces"
        warnings.warn(f"{name} is deprecated; use {new}", DeprecationWarning, stacklevel=2)
    fewest, most = min_num_proc if min_np is None else min_np, max_num_proc if max_np is None else max_np
    elastic = argument_options(
        num_proc if np is None else np, min_num_proc=fewest, max_num_proc=most, slots=slots, reset_limit=reset_limit,
        host_discovery_script=host_discovery_script, cooldown_range=cooldown_range,
    )  # fmt: skip
    if elastic and use_mpi:
        raise ValueError("use_mpi cannot start an elastic job, since MPI ends all ranks when one is lost; leave it out")
    if sum(map(bool, (hosts, hostfile, host_discovery_script))) > 1:
        raise ValueError("give hosts or hostfile or host_discovery_script, only one of them")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    size = elastic.num_proc if elastic else np if np is not None else 1 if num_proc is None else num_proc
    settings = {} if start_timeout is None else {"HOROVOD_START_TIMEOUT": str(start_timeout)}
    names = interface_names(network_interfaces or network_interface, "network_interfaces")
    command = (executable or sys.executable, "-m", task.__name__)
    try:
        chosen = choose_hosts(hosts or "", hostfile or "", size, elastic is not None and bool(elastic.script))
        access = Access(command[0], ssh_port or 0, ssh_identity_file or "", interfaces=names, starters=chosen.starters)
        request = LaunchRequest(command, size, os.environ, flags=settings, output_dir=output_filename or "")
        call = pack(func, args, kwargs)
        if elastic is not None:
            return _run_elastic(request, elastic, chosen.named, access, call)
        with contextlib.closing(_ready(request, chosen.places, access, bool(use_mpi))) as assembly:
            return _make_call(assembly, call, bool(verbose))
    except (LaunchError, ValueError) as error:
        # Frames inside this package do not help the caller; the error keeps its cause.
        raise error.with_traceback(None)  # noqa: B904


def _run_elastic(
    request: LaunchRequest,
    options: ElasticOptions,
    named: Sequence[HostSlots],
    access: Access,
    call: bytes,
) -> list[Any]:
    # Jobs of a fixed size on one host need no ZeroMQ.
    from horovod.launch.elastic_assembly import ElasticAssembly

    flags = {**request.flags, **interface_settings(access.interfaces)}
    with contextlib.closing(ElasticAssembly(replace(request, flags=flags), options, named, access)) as assembly:
        outcome = assembly.run(_sinks(), (signal.SIGINT,), subprocess.DEVNULL, call)
    return elastic_results_of(outcome, assembly.results, _say)


def _say(line: str) -> None:
    _sinks()[1].put(f"horovod.run: {line}\n".encode())


def _sinks() -> tuple[OutputSink, OutputSink]:
    return sink_of(sys.stdout, sys.__stdout__), sink_of(sys.stderr, sys.__stderr__)


def _ready(request: LaunchRequest, where: Sequence[Place], access: Access, use_mpi: bool) -> Assembly:
    is_far = not all(place.is_here for place in where)
    if use_mpi and is_far:
        raise ValueError("use_mpi: mpirun cannot call a function on other hosts; leave it out, or use horovodrun --mpi")
    flags = {**request.flags, **(interface_settings(access.interfaces) if is_far else {})}
    return assemble(replace(request, flags=flags), where, access)


def _make_call(assembly: Assembly, call: bytes, verbose: bool) -> list[Any]:
    """Run the job, and return the results of the ranks."""
    plan, oom_before = assembly.plan, oom_kills()
    for note in (*plan.notes, f"starting {plan.size} ranks of {' '.join(plan.command)} on {plan.hostname}"):
        if verbose:
            _say(note)
    jobs = assembly.jobs(call=call)
    outcome = FixedJob(plan, _sinks(), jobs, assembly.ended).carry_out((signal.SIGINT,), subprocess.DEVNULL)
    return results_of(plan, outcome, jobs, oom_kills() - oom_before if oom_before >= 0 else 0)
