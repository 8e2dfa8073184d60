"""The vocabulary of the log: the requests of ranks and the responses of the coordinator.

Everything here is plain, frozen, typed data, encodable by msgspec; nothing knows a framework.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["ITEMSIZE", "NO_NOTE", "ORDERED", "Kind", "ReduceOp", "Request", "Response", "TensorSpec"]

#: The value for a submission without a note.
NO_NOTE = 0xFFFFFFFF

#: Bytes per element of every dtype that can be moved.
ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


class Kind(enum.IntEnum):
    """The operation that a request asks for."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8

    # Enum.__hash__ is a Python function, and every operation looks up a key that contains a kind.
    __hash__ = int.__hash__


#: The meaning of these depends on the earlier submissions of their rank.
ORDERED = frozenset({Kind.BARRIER, Kind.JOIN, Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET})


class ReduceOp(enum.IntEnum):
    """How values are combined; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a request."""

    dtype: str  # the canonical dtype name, such as `float32`
    shape: tuple[int, ...]  # its dimensions

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.count * ITEMSIZE[self.dtype]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The complete description of an operation; a grouped operation is one request with several tensors."""

    name: str  # the key of the match, or `""`: unnamed requests match in the order of submission
    kind: Kind
    process_set: int = 0  # id of the process set, 0 for all ranks
    tensors: tuple[TensorSpec, ...] = ()  # one entry per tensor
    op: ReduceOp = ReduceOp.SUM  # the reduction, for reductions only
    prescale: float = 1.0  # factor applied before the reduction
    postscale: float = 1.0  # factor applied after it
    root: int = 0  # global rank of a broadcast's root
    splits: tuple[int, ...] = ()  # rows for each member of an alltoall; empty means even
    device: str = "cpu"  # `cpu`, or the framework's word for a device
    ranks: tuple[int, ...] = ()  # members of a process set to add
    # defined by the transport; neighbours in the log are executed as one if the classes of their members are equal and
    # not empty
    fuse_class: str = ""
    parts: str = ""  # what the tensors are, such as the paths of a pytree's leaves; empty if that is not known
    # defined by the transport: where the tensors lie; every transport gets the values of all members
    placement: tuple[int, ...] = ()
    site: str = ""  # `file:line` of the user's call; never compared

    @property
    def label(self) -> str:
        """The operation and the name that the user gave it, for texts."""
        return f"{self.kind.name.lower()} {repr(self.name.split('.', 1)[-1]) if self.name else '(unnamed)'}"


class Response(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log: all ``members`` are ready and execute this next."""

    kind: Kind
    name: str  # the key of the match, or `""` for the oldest unnamed request of the process set
    process_set: int
    members: tuple[int, ...]  # global ranks that take part, ascending
    divisor: int = 1  # the divisor of Average (the size of the set, joined ranks included)
    requests: tuple[Request, ...] = ()  # the members' requests, in the order of `members`; one request if all are equal
    error: str = ""  # when not empty, every member raises this text instead of executing
    error_type: str = ""  # name of the exception in `horovod.errors` that carries `error`
    # an answer that is a plain number (a process set's id; the last rank to join; the lost rank of a PeerLostError)
    result: int = 0

    def request_of(self, index: int) -> Request:
        """Return the request of the ``index``-th member."""
        return self.requests[index if len(self.requests) > 1 else 0]

    def splits(self) -> list[tuple[int, ...]]:
        """Return how many rows each member of an alltoall sends to each member."""
        parts = len(self.members)
        requests = [self.request_of(i) for i in range(parts)]
        return [request.splits or (request.tensors[0].shape[0] // parts,) * parts for request in requests]
