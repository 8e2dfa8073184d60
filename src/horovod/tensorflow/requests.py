"""Settings of a graph node, stored in its attribute."""

from __future__ import annotations

import msgspec

from horovod.bindings.sites import Site
from horovod.core.collectives import COLLECTIVES
from horovod.core.requests import Kind, ReduceOp

__all__ = ["OP_TYPES", "QUERIES", "GraphRequest"]

_NAMES = {kind: kind.name.capitalize() for kind in (*COLLECTIVES, Kind.BARRIER, Kind.JOIN)}
#: Horovod's names of the operations; grouped ones have the same kernel.
OP_TYPES: dict[str, Kind] = {f"Horovod{name}": kind for kind, name in _NAMES.items()}
OP_TYPES |= {f"HorovodGrouped{_NAMES[kind]}": kind for kind, row in COLLECTIVES.items() if row.has_groups}
#: Operations that return a number of this process without a collective.
QUERIES = ("HorovodSize", "HorovodLocalSize", "HorovodRank", "HorovodLocalRank", "HorovodProcessSetIncluded")


class GraphRequest(msgspec.Struct, frozen=True):
    """The settings of one node."""

    name: str = ""  # key of the match, the same on all ranks; empty: in the order of execution
    op: ReduceOp = ReduceOp.SUM  # operation that combines the tensors
    prescale: float = 1.0  # factor applied before the operation
    postscale: float = 1.0  # factor applied after the operation
    root: int = 0  # global rank of a broadcast's root
    process_set: int = 0
    parts: str = ""  # what the tensors are, to compare between ranks; empty if that is not known
    even: bool = True  # whether an alltoall splits evenly and ignores its splits input
    site: Site = Site()  # the user's line that created the node

    def encode(self) -> str:
        """Return the request as text, for the attribute."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: bytes) -> GraphRequest:
        """Return the request from the text of an attribute."""
        return msgspec.json.decode(text, type=GraphRequest)
