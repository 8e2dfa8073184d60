"""A job service in a process of its own, on rank 0's host: for launchers that start the ranks themselves.

Its standard input begins with a line of JSON: secret, addresses, ports. It prints its endpoints as a line of JSON; an
empty list when another process of the job runs the service already. It ends with the rank that has started it; if a
host has failed, it first tells all others.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence

from horovod.core.membership_events import Policy
from horovod.errors import InitError
from horovod.rendezvous.client import connected, endpoints_of, ports, service_secret
from horovod.rendezvous.interfaces import endpoint, own_addresses
from horovod.rendezvous.programs import await_answer, start_program
from horovod.rendezvous.service import Service
from horovod.rendezvous.waiting import Patience
from horovod.syscalls import open_process
from horovod.world import World

__all__ = ["end_services", "host_service", "is_here", "main", "serve"]

#: Time for which an ending service waits for hosts that do not know yet of the failure of another host.
_TELL_S = 3.0
#: Time for another service of this job to prove that it has the key.
_ANSWER_S = 1.0
_END_S = 6.0
_hosted: dict[bytes, list[str]] = {}
_processes: list[subprocess.Popen[bytes]] = []


def host_service(world: World, interfaces: Sequence[str] = ()) -> list[str]:
    """Start the service of a job, on rank 0's host, unless this process has done so before. It listens on the given
    interfaces, the best one first, or on all. Return its endpoints; none when another process of the job runs it
    already.

    Raises:
        InitError: the service does not start.

    Blocks until it listens.
    """
    secret = service_secret(world)
    if secret not in _hosted:
        _hosted[secret] = _start(secret, [*own_addresses(interfaces), "127.0.0.1"], ports(world))
    return _hosted[secret]


def is_here(world: World) -> bool:
    """Return whether the other hosts look for the service on this host.

    Several hosts of a job may be one machine; there, only the first one counts.
    """
    own = own_addresses()
    found = (where.removeprefix("tcp://").rpartition(":")[0].strip("[]") for where in endpoints_of(world))
    return world.cross_rank == 0 and any(host in own or host == "127.0.0.1" for host in found)


def _start(secret: bytes, addresses: Sequence[str], numbers: Sequence[int]) -> list[str]:
    words = [secret.hex(), list(addresses), list(numbers), os.getpid()]
    process = start_program(__name__, words, subprocess.PIPE, subprocess.DEVNULL, keeps_input=True)
    if not _processes:
        atexit.register(end_services)
    _processes.append(process)
    found = await_answer(process)
    if isinstance(found, str):
        raise InitError(f"the job service cannot listen: {found}")
    endpoints: list[str] = found
    return endpoints


def end_services() -> None:
    """End the services that this process has started; a forked child of it does nothing."""
    while _processes:
        _end(_processes.pop())
    _hosted.clear()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    process.stdout.close()
    try:
        process.communicate(b"end", timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except (OSError, ValueError):
        process.wait()


def _answers(secret: bytes, endpoints: Sequence[str]) -> bool:
    try:
        with connected(secret, lambda: endpoints, Patience(_ANSWER_S), ""):
            return True
    except InitError:
        return False


def serve(
    secret: bytes, addresses: Sequence[str], numbers: Sequence[int], policy: Policy | None = None
) -> Service | None:
    """Return a service of a job, or None when another process runs it already. This host must reach itself by the last
    address; the job looks for its service at the ports in ``numbers``.

    Raises:
        OSError: the service cannot listen.
    """
    service, refused = None, OSError()
    try:
        service = Service(secret, addresses, numbers, policy=policy)
    except OSError as error:
        refused = error
    # Ports may be taken by a stranger, which does not answer, or by a service of this job.
    listening = service.endpoints if service is not None else []
    wanted = [endpoint(addresses[-1], number) for number in numbers]
    is_second = bool(taken := [where for where in wanted if where not in listening]) and _answers(secret, taken)
    if service is None and not is_second:
        raise refused
    if service is not None and is_second:
        service.close()
    return None if is_second else service


def main() -> int:
    """Entry point of the process."""
    secret, addresses, numbers, parent = json.loads(sys.stdin.buffer.readline())
    parent_fd = open_process(parent)
    if os.getppid() != parent:
        return 1
    secret = bytes.fromhex(secret)
    try:
        service = serve(secret, addresses, numbers)
    except OSError as error:
        print(json.dumps(str(error)), flush=True)
        return 1
    if service is None:
        print(json.dumps([]), flush=True)
        return 0
    print(json.dumps(service.endpoints), flush=True)
    select.select([0, parent_fd], [], [])
    service.await_told(_TELL_S)
    service.close()
    return 0
