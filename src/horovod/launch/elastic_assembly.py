"""Prepare an elastic job from the user's options; for ``horovodrun``, ``horovod.run``, Ray and Spark."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod.config import ELASTIC, JOB_ID, SECRET_KEY
from horovod.core.membership_events import Policy
from horovod.errors import InitError, LaunchError
from horovod.files import claimed
from horovod.launch.assemble import access_for, settings_of
from horovod.launch.discovery import read_hosts
from horovod.launch.elastic import ElasticJob
from horovod.launch.elastic_options import ElasticOptions
from horovod.launch.host_checks import HostCheck, check_hosts, close_hosts
from horovod.launch.host_pool import HostPool, Pool
from horovod.launch.hosts import HostSlots, is_this_host
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchPlan, LaunchRequest, elastic_plan
from horovod.launch.report import Outcome
from horovod.launch.ssh import Access
from horovod.launch.workers import listen_addresses
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.keys import local_name
from horovod.rendezvous.service import Service

__all__ = ["ElasticAssembly", "run_on_pool"]


class ElasticAssembly:
    """An elastic job that is ready to run; its hosts are checked, unless a script names them. The request gives the
    timeout, command and path of ``access``.

    Raises:
        LaunchError: a host has problems, one sentence for each; or the job service cannot listen.
        ValueError: a setting has a wrong value, or there are too few slots.

    Blocks until all named hosts have answered, for ``--start-timeout`` at most.
    """

    def __init__(
        self, request: LaunchRequest, options: ElasticOptions, named: Sequence[HostSlots], access: Access
    ) -> None:
        settings = settings_of(request)
        self.plan = elastic_plan(request)
        self._request, self._options, self._state_folder = request, options, settings.checkpoint_dir
        self._access = access_for(request, access, settings)
        self._offers = {} if options.script else _offers(named, options, request.hostname)
        others = [offer.name for name, offer in self._offers.items() if name != request.hostname]
        here = request.hostname if request.hostname in self._offers else ""
        self._found: dict[str, HostCheck] = {}
        if others:
            self._found = check_hosts(others, here, self._access)
        own = local_name(bytes.fromhex(request.key), request.job)
        try:
            far = own_addresses(access.interfaces) if others or options.script else []
            policy = options.policy(settings.elastic_timeout_s, settings.start_timeout_s)
            self._service = Service(bytes.fromhex(request.key), [own, *far], policy=policy)
        except (OSError, InitError) as error:
            close_hosts(self._found)
            raise LaunchError(f"cannot open the job service on this host: {error}") from error
        self._endpoints = own, ",".join(where for where in self._service.endpoints if where != own)
        #: Results of the ranks of the last generation that have ended well, pickled, in rank order.
        self.results: list[bytes] = []

    def run(
        self,
        sinks: tuple[OutputSink, OutputSink],
        signals: Sequence[signal.Signals] = (),
        stdin: int | None = None,
        call: bytes = b"",
    ) -> Outcome:
        """Run the job to its end; the arguments are those of ``ElasticJob`` and its ``carry_out``.

        Raises:
            LaunchError: the job could not be started, as when another job uses the folder for its state.
        """
        request, options = self._request, self._options
        with contextlib.ExitStack() as stack:
            _claim(self._state_folder, stack)
            pool = HostPool(request.hostname, request.cores, self._access, options.cool_down_s, self._found)
            job = ElasticJob(
                self.plan, sinks, options, self._service, pool, self._offers, self._endpoints, request.output_dir, call
            )
            outcome = job.carry_out(signals, stdin)
        self.results = job.results()
        return outcome

    def close(self) -> None:
        """Disconnect from the hosts. Blocks until their agents have ended."""
        close_hosts(self._found)
        self._service.close()


def _claim(folder: str, stack: contextlib.ExitStack) -> None:
    """Keep other jobs from the folder for the state, until the stack is closed."""
    try:
        if folder:
            stack.enter_context(claimed(Path(folder)))
    except BlockingIOError:
        raise LaunchError(
            f"another job uses HOROVOD_CHECKPOINT_DIR (--checkpoint-dir) {folder}, and each would remove the state of "
            "the other, or go on with it; give each training a folder of its own"
        ) from None
    except OSError:
        pass  # the ranks say so if they cannot use it, either


def run_on_pool(
    plan: LaunchPlan,
    sinks: tuple[OutputSink, OutputSink],
    options: ElasticOptions,
    policy: Policy,
    pool: Pool,
    interfaces: Sequence[str],
    call: bytes = b"",
    signals: Sequence[signal.Signals] = (),
) -> tuple[Outcome, list[Any]]:
    """Run an elastic job in processes of another system, and return how it went, with the results in rank order.

    Args:
        plan: command and environment of the processes, without the identity of the job.
        sinks: where standard output and standard error of the ranks go.
        options: the user's options.
        policy: how the members of the job may change.
        pool: the places of the other system.
        interfaces: network interfaces of this host at which the ranks find the job service; all when empty.
        call: the call that each rank makes, if the processes do not get it otherwise.
        signals: signals to this process that mean the job.

    Raises:
        InitError: an interface does not exist, or has no address.
        OSError: the job service cannot listen at any address.

    Blocks until the job is over.
    """
    key = secrets.token_hex(32)
    service = Service(bytes.fromhex(key), listen_addresses(interfaces), policy=policy)
    try:
        common = {ELASTIC: "1", JOB_ID: secrets.token_hex(16), SECRET_KEY: key}
        plan = replace(plan, environ={**plan.environ, **common})
        where = ",".join(service.endpoints)
        job = ElasticJob(plan, sinks, options, service, pool, {}, (where, where), call=call)
        return job.carry_out(signals, None), job.results()
    finally:
        service.close()


def _offers(named: Sequence[HostSlots], options: ElasticOptions, own: str) -> dict[str, HostSlots]:
    if not named:
        return {own: HostSlots("localhost", options.maximum + options.spares)}
    offers = read_hosts(named, is_this_host, own)
    slots = sum(offer.slots for offer in offers.values())
    if slots < options.num_proc:
        raise ValueError(
            f"-np {options.num_proc} is more than the {slots} slots of the hosts; lower it or give the hosts more slots"
        )
    if options.spares and slots < options.maximum + options.spares:
        raise ValueError(
            f"--max-np {options.maximum} and --spares {options.spares} are more than the {slots} slots of the hosts; "
            "lower --max-np (default: -np), or give the hosts more slots"
        )
    return offers
