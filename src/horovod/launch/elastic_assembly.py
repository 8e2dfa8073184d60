"""Prepare an elastic job from the user's options; for ``horovodrun`` and ``horovod.run``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from horovod import config
from horovod.errors import InitError, LaunchError
from horovod.launch.discovery import HostOffer, read_hosts
from horovod.launch.elastic import ElasticJob
from horovod.launch.elastic_options import ElasticOptions
from horovod.launch.host_checks import CheckedHosts, check_hosts
from horovod.launch.host_pool import HostPool
from horovod.launch.hosts import HostSlots
from horovod.launch.machine import is_this_host
from horovod.launch.outcome import Outcome
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchRequest, elastic_plan
from horovod.launch.ssh import Access
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.keys import local_name
from horovod.rendezvous.service import Service

__all__ = ["ElasticAssembly"]


class ElasticAssembly:
    """An elastic job that is ready to run; its hosts are checked, unless a script names them.

    Args:
        request: the user's request.
        options: the user's options for the elastic job.
        named: the hosts that the user named; this host when empty.
        access: how to reach other hosts; the settings replace its timeout.

    Raises:
        LaunchError: a host has problems, one sentence for each; or the job service cannot listen.
        ValueError: a setting has a wrong value, or there are too few slots.

    Blocks until all named hosts have answered, for ``--start-timeout`` at most.
    """

    def __init__(
        self, request: LaunchRequest, options: ElasticOptions, named: Sequence[HostSlots], access: Access
    ) -> None:
        settings = config.load({**request.file, **request.environ, **request.flags})
        self.plan = elastic_plan(request)
        self._request, self._options = request, options
        self._access = replace(access, timeout_s=settings.start_timeout_s)
        self._offers = {} if options.script else _offers(named, options, request.hostname)
        others = [offer.address for name, offer in self._offers.items() if name != request.hostname]
        here = request.hostname if request.hostname in self._offers else ""
        self._found = CheckedHosts({})
        if others:
            self._found = check_hosts(others, here, self._access, request.command[0], request.environ.get("PATH", ""))
        own = local_name(bytes.fromhex(request.key), request.job)
        try:
            far = own_addresses(access.interfaces) if others or options.script else []
            policy = options.policy(settings.elastic_timeout_s, settings.start_timeout_s)
            self._service = Service(bytes.fromhex(request.key), [own, *far], policy=policy)
        except (OSError, InitError) as error:
            self._found.close()
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
        """Run the job to its end; see ``supervise``.

        Args:
            sinks: where standard output and standard error of the ranks go.
            signals: signals to this process that mean the job.
            stdin: standard input of the first process, as ``subprocess`` takes it.
            call: the call that each rank makes, if it is one of ``horovod.run``.

        Raises:
            LaunchError: the job could not be started.
        """
        request, options = self._request, self._options
        pool = HostPool(
            request.hostname, request.cores, self._access, request.command[0], request.environ.get("PATH", ""),
            options.cool_down_s, self._found,
        )  # fmt: skip
        job = ElasticJob(
            self.plan, sinks, options, self._service, pool, self._offers, self._endpoints, request.output_dir, call
        )
        outcome = job.carry_out(signals, stdin)
        self.results = job.results()
        return outcome

    def close(self) -> None:
        """Disconnect from the hosts. Blocks until their agents have ended."""
        self._found.close()
        self._service.close()


def _offers(named: Sequence[HostSlots], options: ElasticOptions, own: str) -> dict[str, HostOffer]:
    if not named:
        return {own: HostOffer("localhost", options.maximum + options.spares)}
    offers = read_hosts(named, is_this_host, own)
    slots = sum(offer.slots for offer in offers.values())
    if slots < options.num_proc:
        raise ValueError(
            f"-np {options.num_proc} is more than the {slots} slots of the hosts; lower it or give the hosts more slots"
        )
    return offers
