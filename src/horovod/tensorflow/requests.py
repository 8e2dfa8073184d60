"""What a node of a graph asks for, as the attribute that travels with it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import msgspec

from horovod.core.requests import Kind, ReduceOp

__all__ = ["OP_TYPES", "QUERIES", "GraphRequest", "Site"]

#: Horovod's names of the operations; those of a group have the same kernel.
OP_TYPES: dict[str, Kind] = {
    "HorovodAllreduce": Kind.ALLREDUCE,
    "HorovodGroupedAllreduce": Kind.ALLREDUCE,
    "HorovodAllgather": Kind.ALLGATHER,
    "HorovodGroupedAllgather": Kind.ALLGATHER,
    "HorovodBroadcast": Kind.BROADCAST,
    "HorovodAlltoall": Kind.ALLTOALL,
    "HorovodReducescatter": Kind.REDUCESCATTER,
    "HorovodGroupedReducescatter": Kind.REDUCESCATTER,
    "HorovodBarrier": Kind.BARRIER,
    "HorovodJoin": Kind.JOIN,
}
#: Operations that ask this process for a number.
QUERIES = ("HorovodSize", "HorovodLocalSize", "HorovodRank", "HorovodLocalRank", "HorovodProcessSetIncluded")


class Site(msgspec.Struct, frozen=True, array_like=True):
    """The line of the user's script that made a node.

    Attributes:
        file: its path.
        line: its number.
        function: what it belongs to.
    """

    file: str
    line: int
    function: str

    def stand_in(self) -> Callable[[Callable[[], Any]], Any]:
        """Return ``fn(function)``, which calls the function as if the user's line did.

        The kernel runs on a thread of TensorFlow's that knows nothing of the user's script; with this frame on the
        stack, errors and reports of stuck ranks name the user's line as they do everywhere else.
        """
        code = _call.__code__.replace(
            co_filename=self.file, co_firstlineno=self.line, co_name=self.function or "<module>"
        )
        return types.FunctionType(code, {"__name__": "__main__"})


_call = lambda function: function()  # noqa: E731  on one line, whose number is replaced


class GraphRequest(msgspec.Struct, frozen=True):
    """The settings of one node.

    Attributes:
        name: key of the match, the same on all ranks; empty: in the order of execution.
        op: how to combine.
        prescale: factor before that.
        postscale: factor after it.
        root: global rank of a broadcast's root.
        process_set: number of the process set.
        even: whether an alltoall splits evenly, so that its splits are not looked at.
        site: where the user made the node.
    """

    name: str = ""
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    process_set: int = 0
    even: bool = True
    site: Site = Site("<unknown>", 0, "")

    def encode(self) -> str:
        """Return it as text, for an attribute."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: bytes) -> GraphRequest:
        """Return the request of an attribute."""
        return msgspec.json.decode(text, type=GraphRequest)
