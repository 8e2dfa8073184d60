"""Elastic jobs whose processes srun or torchrun starts: the first of them starts the job service, which decides.

It is a process of its own on rank 0's host (``launch.elastic_service``). On each other host the first process of the
job starts one that watches the others there (``host_watch``). Both outlive the process that has started them.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import subprocess

from horovod.config import Config
from horovod.core.membership_events import Policy
from horovod.errors import InitError
from horovod.launchers import LAUNCHERS, hosts_and_run_of_step
from horovod.rendezvous import hosts
from horovod.rendezvous.client import connected, endpoints_of, ports, service_secret
from horovod.rendezvous.host_watch import start_watch
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.programs import await_answer, start_program
from horovod.rendezvous.vouching import vouch
from horovod.rendezvous.waiting import Patience
from horovod.world import Meeting, World

__all__ = ["LAUNCHERS_OF_OPEN_JOBS", "enter"]

LAUNCHERS_OF_OPEN_JOBS = ("slurm", "torchrun")
"""Launchers that let ranks live when one is lost, at least those of other hosts."""
_SERVICE = "horovod.launch.elastic_service"
#: Above the ranks of any launcher, so that the number of a process that joins later is free.
_JOINED = 1 << 20


def enter(world: World, settings: Config) -> tuple[World, tuple[str, int]]:
    """Find the job service, or start it on rank 0, and have this host watched. Return ``world`` with the service's
    endpoint and key, and host and number of this process's slot.

    Raises:
        InitError: ranks on several hosts have no key in common, or the service does not start.
        PeerLostError: a rank has ended meanwhile.

    Blocks until the service answers, or HOROVOD_START_TIMEOUT seconds.
    """
    row = next(row for row in LAUNCHERS if row.name == world.launcher)
    if settings.join_step or world.launcher == "slurm":
        places, run = hosts_and_run_of_step(settings.join_step)
        meeting = dataclasses.replace(world.meeting, kind="hosts", places=places, run=run)
        world = dataclasses.replace(world, meeting=meeting)
    if settings.join_step:  # its rank and size mean nothing
        world = dataclasses.replace(world, rank=1, size=2)
    is_vouched = row.is_vouched and not world.meeting.has_key
    find_key = vouch if is_vouched else hosts.prepare  # also on one host: other steps may join
    world = find_key(world, settings.start_timeout_s)
    secret = service_secret(world)
    if world.rank == 0 and not settings.join_step:
        policy = Policy(
            size=world.size, minimum=min(settings.min_np, world.size), is_open=True,
            timeout_s=settings.elastic_timeout_s, start_timeout_s=settings.start_timeout_s,
        )  # fmt: skip
        _start_service(world, secret, policy, is_vouched)
    where = _find_service(world, secret, settings.start_timeout_s)
    if world.local_rank == 0 and (world.rank or settings.join_step):
        start_watch(secret, [where], world.hostname)
    number = _JOINED + os.getpid() if settings.join_step else world.rank
    job = f"{world.launcher}-{hmac.digest(secret, b'name', 'sha256').hex()[:32]}"
    meeting = Meeting("addresses", (where,), has_key=True)
    return dataclasses.replace(world, job=job, key=secret, meeting=meeting), (world.hostname, number)


def _start_service(world: World, secret: bytes, policy: Policy, is_vouched: bool) -> None:
    addresses = [*own_addresses(), "127.0.0.1"]
    offer = [world.meeting.run, world.key.hex(), own_addresses()] if is_vouched else []
    words = [secret.hex(), addresses, ports(world), world.hostname, dataclasses.asdict(policy), offer]
    process = start_program(_SERVICE, words, subprocess.PIPE)
    assert process.stdout is not None
    error = await_answer(process)
    process.stdout.close()
    if error:
        raise InitError(f"the job service did not start: {error}")


def _find_service(world: World, secret: bytes, timeout_s: float) -> str:
    first = ", ".join(world.meeting.places)
    nobody = (
        f"rank {world.rank} found no job service of this job on {first}: has rank 0 called init() there, is "
        f"HOROVOD_ELASTIC=1 set on all ranks, is HOROVOD_SECRET_KEY the same, and is no firewall in between?"
    )
    with connected(secret, lambda: endpoints_of(world), Patience(timeout_s), nobody) as (_, where):
        return where
