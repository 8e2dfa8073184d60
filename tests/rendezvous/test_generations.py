"""A job service with a policy: events of the launcher go in, decisions come out."""

from __future__ import annotations

import secrets
import select
from collections.abc import Iterator

import pytest

from horovod.core.membership_events import Decision, Discovered, Ended, Finish, Policy, Slot, Start
from horovod.rendezvous.keys import local_name
from horovod.rendezvous.service import Service

KEY = secrets.token_bytes(32)
LONG_S = 60.0


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service(KEY, [local_name(KEY, "elastic job")], policy=Policy(2, is_elastic=True, maximum=3, spares=1))
    yield service
    service.close()


def decisions(service: Service, count: int) -> list[Decision]:
    """Wait for so many decisions, as a launcher does."""
    found: list[Decision] = []
    while len(found) < count:
        assert select.select([service], [], [], LONG_S)[0], f"only {found}"
        found += service.take()
    assert not select.select([service], [], [], 0)[0]
    return found


def test_the_launcher_gets_decisions_about_what_it_has_put(service: Service) -> None:
    service.put(Discovered({"a": 6}))
    assert decisions(service, 4) == [Start(Slot("a", number)) for number in range(4)]
    for number in range(4):
        service.put(Ended(Slot("a", number), "was killed by SIGKILL"))
    (finish,) = decisions(service, 1)
    assert isinstance(finish, Finish)
    assert "was killed by SIGKILL" in finish.why
    assert service.progress == 0


def test_a_service_without_a_policy_takes_no_events() -> None:
    service = Service(KEY, [local_name(KEY, "plain job")])
    with pytest.raises(ValueError, match="policy"):
        service.put(Discovered({"a": 1}))
    service.close()
