"""The job service of an elastic job whose processes srun or torchrun starts; a process of its own on rank 0's host.

Its standard input begins with a line of JSON, as ``rendezvous.open_jobs`` writes it. It prints a line of JSON: an
error, or an empty text when it listens. It reports events of the job on standard error, as ``horovodrun`` does. It
ends when no process of the job is left.
"""

from __future__ import annotations

import json
import math
import select
import sys
import threading
import time

from horovod.core.membership_events import Assign, Begin, Fence, Finish, Gone, Note, Policy, Silent, TrainingOver
from horovod.errors import InitError
from horovod.launch.elastic_members import ElasticMembers
from horovod.phrases import printable
from horovod.rendezvous.host_watch import ignore_signals, watch_host
from horovod.rendezvous.hosting import serve
from horovod.rendezvous.munge import Munge, MungeError
from horovod.rendezvous.service import Service
from horovod.rendezvous.vouching import Offer, offer_by_munge

__all__ = ["main"]

_LOOK_S = 0.5
#: Time for processes to read that the job has ended, and for watches to read that they may end.
_END_S = 5.0


class _Job:
    """Reports the events of the job, and has processes killed."""

    def __init__(self, service: Service, policy: Policy) -> None:
        self._service, self._policy = service, policy
        self._members = ElasticMembers()
        self._end_by = math.inf

    def run(self) -> None:
        """Serve until the job has ended."""
        while time.monotonic() < self._end_by:
            select.select([self._service.fileno()], [], [], _LOOK_S)
            now = time.monotonic()
            for decision in self._service.take():
                self._take(decision, now)
            if line := self._members.ledger.waiting(now, self._policy.minimum):
                _say(line)
        if summary := self._members.ledger.summary(time.monotonic(), self._service.progress):
            _say(summary)

    def _take(self, decision: object, now: float) -> None:
        if isinstance(decision, Fence | Silent):
            self._service.order(decision)
        elif isinstance(decision, Assign):
            for slot in decision.positions:
                if slot not in self._members.running:
                    self._members.start(slot, self._policy.size)
            self._members.assigned(now, decision)
        elif isinstance(decision, Begin):
            self._begin(decision, now)
        elif isinstance(decision, TrainingOver):
            self._members.ledger.is_trained = True
        elif isinstance(decision, Gone):
            self._note_end(decision, now)
        elif isinstance(decision, Note):
            _say(decision.text)
        elif isinstance(decision, Finish):
            if decision.why:
                _say(f"the job has ended: {decision.why}")
            self._service.order(None)
            self._end_by = now + _END_S

    def _begin(self, begin: Begin, now: float) -> None:
        hosts = {process: slot.host for slot, process in self._members.running.items()}
        for line in self._members.begun(now, begin.generation, begin.progress, lambda p: f"on {hosts[p]}"):
            _say(line)

    def _note_end(self, gone: Gone, now: float) -> None:
        process = self._members.running.pop(gone.slot, -1)
        who = f"{self._members.name(process)} (pid {gone.pid} on {gone.slot.host})"
        members = self._members
        for line in members.lost(now, process, who, gone.how, 1, "") if gone.how else members.left(process, who):
            _say(line)


def _say(text: str) -> None:
    try:
        print(f"horovod: {printable(text)}", file=sys.stderr, flush=True)
    except OSError:
        pass  # standard error has no reader any more


def main() -> int:
    """Entry point of the process."""
    ignore_signals()
    secret, addresses, ports, host, fields, offer = json.loads(sys.stdin.buffer.readline())
    secret, policy = bytes.fromhex(secret), Policy(**fields)
    try:
        service = serve(secret, addresses, ports, policy)
        if service is not None and offer:
            run, key, places = offer
            _let_others_join(Offer(run, bytes.fromhex(key), places))
    except (OSError, InitError) as error:
        print(json.dumps(str(error)), flush=True)
        return 1
    print(json.dumps(""), flush=True)
    sys.stdout.close()
    if service is None:  # this process's rank has called init() again
        return 0
    watch = threading.Thread(
        target=watch_host, args=(secret, service.endpoints, host), name="horovod-watch", daemon=True
    )
    watch.start()
    _Job(service, policy).run()
    watch.join(_END_S)
    service.close()
    return 0


def _let_others_join(offer: Offer) -> None:
    """Give the key to processes of this user that join later, as other steps of Slurm do."""
    try:
        offer_by_munge(Munge(), offer, sys.maxsize, math.inf)
    except MungeError:
        pass  # the key is a file
