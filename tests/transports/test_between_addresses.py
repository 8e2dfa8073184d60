"""At which of its addresses a host is reached: Gloo wants all of one family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from horovod.transports.between import _address
from horovod.transports.topology import Topology

HOSTS = ((0, 1), (2, 3), (4,))
#: Rank 0's host, by the family of addresses in which it was reached.
STORE = {4: "tcp://10.0.0.1:5555", 6: "tcp://[fd00::1]:5555"}


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
            endpoint=STORE[agreed if rank == 2 else own], get=said.__getitem__, set=said.__setitem__
        )
        found[rank] = _address(Topology(rank, HOSTS), store, _towards(rank))
    if agreed == 4:
        assert found == {0: "10.0.0.1", 1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.2", 4: "10.0.0.3"}
    else:
        assert found == {0: "fd00::1", 1: "fd00::1", 2: "fd00::2", 3: "fd00::2", 4: "fd00::3"}
