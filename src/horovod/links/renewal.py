"""Makes the link of a process: once in most jobs; in an elastic job again for each generation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from horovod import logs
from horovod.config import Config
from horovod.engine.engine import Engine
from horovod.engine.link import Link
from horovod.engine.ports import Observer
from horovod.errors import HorovodInternalError, InitError
from horovod.links import local
from horovod.links.shm import link as shm
from horovod.rendezvous import process_tree
from horovod.world import NUMBERS, World, export

if TYPE_CHECKING:
    from horovod.rendezvous.membership_client import MembershipClient
    from horovod.rendezvous.protocol import MemberPlace

__all__ = ["assemble", "connect", "renew"]

#: Seconds that the service may take to notice the loss that made a meeting fail; and the limit of other failures.
_VERDICT_S, _TRIES = 10.0, 3


def assemble(world: World, settings: Config, number: int, observer: Observer) -> Link:
    """Meet the other ranks, if there are any, and return this rank's link. ``number`` counts the successful meetings of
    this job.

    Raises:
        InitError: this machine lacks a requirement, or the ranks did not find each other.
        PeerLostError: another rank died meanwhile.

    Blocks until all ranks have come, or HOROVOD_START_TIMEOUT seconds.
    """
    if world.size == 1:
        return local.assemble(settings, number)
    if world.is_spread:
        # ZeroMQ takes a while to load, and one host does not need it.
        from horovod.links.hosts import link as hosts

        return hosts.assemble(world, settings, number, observer)
    return shm.assemble(world, settings, number, observer)


def connect(world: World, settings: Config, on_loss: Callable[[int, str], None]) -> tuple[MembershipClient, World]:
    """Connect this process of an elastic job with the job service; return the connection, and its place until it has
    joined a generation. See ``MembershipClient`` for ``on_loss``.

    Raises:
        InitError: this is not a process of an elastic job, or no service answers.

    Blocks until the service has answered, or HOROVOD_START_TIMEOUT seconds.
    """
    # ZeroMQ takes a while to load, and other jobs on one host do not need it.
    from horovod.rendezvous import open_jobs
    from horovod.rendezvous.membership_client import MembershipClient

    is_open = world.launcher in open_jobs.LAUNCHERS_OF_OPEN_JOBS
    if world.launcher != "horovodrun" and not is_open:
        starter = "no launcher" if world.launcher == "none" else world.launcher
        raise InitError(
            f"HOROVOD_ELASTIC=1 is set, and {starter} has started this process: only horovodrun, srun and torchrun let "
            "ranks live when another one is lost. MPI, for example, would end or restart all ranks. Unset it, or use "
            "horovodrun"
        )
    slot, home = (world.hostname, world.local_rank), "horovodrun"
    if is_open:
        world, slot = open_jobs.enter(world, settings)
        home = "the job's service on rank 0's host"
    if parent := process_tree.rank_above(world.job):
        raise InitError(f"init() in a child of a rank: {process_tree.is_no_rank(world, parent)}")
    client = MembershipClient(world.meeting.places, world.key, slot, settings.start_timeout_s, on_loss, home)
    if client.status.begun:  # a newcomer, which is not rank 0
        size = max(2, client.status.size)
        world = dataclasses.replace(world, rank=size - 1, size=size)
    if client.status.may_spread:
        from horovod.transports import between

        between.preload(settings, world.launcher)  # while the others train: it may take seconds
    export(world)
    return client, world


def renew(
    client: MembershipClient, base: World, settings: Config, observer: Observer, progress: int, digest: str
) -> tuple[World, Engine, MemberPlace]:
    """Join the next generation of an elastic job, with so many completed steps and this hash of the state. Return this
    process's world in it, its engine, which is not started yet, and its place. ``base`` has the host, job and key of
    this process.

    Raises:
        DismissedError: this process is not a member any more.
        InitError: the job is over, or this machine lacks a requirement.

    Blocks until all members of a generation have met.
    """
    from horovod.rendezvous.membership_client import Superseded

    client.ready(progress, digest)
    failures = 0
    while True:
        place = client.await_place()
        world = _at(place, base, client)
        logs.configure(settings, world.rank)
        engine = None
        try:
            engine = Engine(assemble(world, settings, place.generation, observer), settings, observer)
            client.joined(place)
            export(world)
            return world, engine, place
        except BaseException as error:
            if engine is not None:
                engine.stop("its generation did not come about")
            if isinstance(error, Superseded):
                continue
            if not isinstance(error, HorovodInternalError):
                raise
            # A loss is an ordinary event, which the service notices, too. It does not notice other failures.
            if client.is_superseded(place, _VERDICT_S):
                continue
            failures += 1
            if isinstance(error, InitError) or failures >= _TRIES:
                raise
            client.ready(progress, digest)


def _at(place: MemberPlace, base: World, client: MembershipClient) -> World:
    return dataclasses.replace(
        base,
        **{name: getattr(place, name) for name in NUMBERS},
        job=f"{base.job}#{place.generation}",  # so that no meeting is taken for another one
        meeting=dataclasses.replace(
            base.meeting, generation=place.generation, check=functools.partial(client.check, place)
        ),
    )
