"""At which of its addresses a host is reached: Gloo wants all of one family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from horovod.errors import PeerLostError
from horovod.transports.between import _address
from horovod.transports.topology import Topology

HOSTS = ((0, 1), (2, 3), (4,))
#: Rank 0's host, by the family of addresses in which it was reached.
STORE = {4: "tcp://10.0.0.1:5555", 6: "tcp://[fd00::1]:5555"}
#: All is well.
WATCH: Any = SimpleNamespace(check=lambda rank, waited_s: None)


def _towards(rank: int) -> Any:
    host = next(index for index, ranks in enumerate(HOSTS, 1) if rank in ranks)

    def towards(endpoint: str) -> str:
        return f"fd00::{host}" if ":" in (urlsplit(endpoint).hostname or "") else f"10.0.0.{host}"

    return towards


@pytest.mark.parametrize("agreed", [4, 6])
@pytest.mark.parametrize("own", [4, 6])
def test_all_ranks_take_one_family_however_they_reached_the_store(agreed: int, own: int) -> None:
    said: dict[str, bytes] = {}
    found = {}
    # The second host's first rank says which; others wait for it.
    for rank in (2, 0, 1, 3, 4):
        store: Any = SimpleNamespace(
            endpoint=STORE[agreed if rank == 2 else own], get=lambda key, _: said[key], set=said.__setitem__
        )
        found[rank] = _address(Topology(rank, HOSTS), store, _towards(rank), WATCH, 60.0)
    if agreed == 4:
        assert found == {0: "10.0.0.1", 1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.2", 4: "10.0.0.3"}
    else:
        assert found == {0: "fd00::1", 1: "fd00::1", 2: "fd00::2", 3: "fd00::2", 4: "fd00::3"}


def _says_nothing(key: str, timeout_s: float) -> bytes:
    raise TimeoutError(key)


STORE_WITHOUT: Any = SimpleNamespace(endpoint=STORE[4], get=_says_nothing)


def test_who_waits_for_a_host_that_is_lost_hears_of_it() -> None:
    def check(rank: int, waited_s: float) -> None:
        raise PeerLostError(f"rank {rank} is lost", rank=rank)

    watch: Any = SimpleNamespace(check=check, is_alarmed=True)
    with pytest.raises(PeerLostError, match="rank 2 is lost"):
        _address(Topology(4, HOSTS), STORE_WITHOUT, _towards(4), watch, 60.0)


def test_who_waits_for_a_host_that_says_nothing_gives_up() -> None:
    with pytest.raises(TimeoutError, match="rank 2 did not publish its address of rank 0 within 0 s"):
        _address(Topology(0, HOSTS), STORE_WITHOUT, _towards(0), WATCH, 0.0)
