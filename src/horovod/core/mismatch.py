"""Check that the requests of all members fit together; if not, return the error text that every member raises.

Each text names the difference, and then lists every rank's value and the line of user code behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod.core import labels
from horovod.core.collectives import COLLECTIVES
from horovod.core.requests import Kind, Request

__all__ = ["compare", "describe_waiting"]

_SETS = (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET)


def compare(members: Sequence[int], requests: Sequence[Request], joined: Sequence[int] = ()) -> str:
    """Return the error text for the members' requests if they do not fit together, or an empty string. Ranks that have
    called join() take no part.
    """
    first = requests[0]
    for noun, value in _checks(first):
        values = [value(request) for request in requests]
        if any(other != values[0] for other in values):
            return _report(noun, first, members, requests, values)
    return _semantics(first, members, requests, joined)


def _checks(first: Request) -> list[tuple[str, Callable[[Request], object]]]:
    kind = first.kind
    checks: list[tuple[str, Callable[[Request], object]]] = [
        ("operations", lambda request: request.kind.name.lower()),
        ("number of tensors", lambda request: len(request.tensors)),
        ("names of the tensors", lambda request: request.parts),
        ("data types", lambda request: _one_or_all([tensor.dtype for tensor in request.tensors])),
    ]
    row = COLLECTIVES.get(kind)
    if row is not None and row.reduces:
        checks += [
            ("reduction operations", lambda request: request.op.name.capitalize()),
            ("prescale and/or postscale factors", lambda request: (request.prescale, request.postscale)),
        ]
    if row is not None and not row.rows_differ:
        checks.append((f"{kind.name} tensor shapes", lambda r: _one_or_all([list(t.shape) for t in r.tensors])))
    if row is not None and row.rows_differ:
        checks.append((f"number of dimensions of the {kind.name} tensors", lambda r: [len(t.shape) for t in r.tensors]))
        checks.append(
            (
                f"{kind.name} tensor shapes after the first dimension",
                lambda r: _one_or_all([list(t.shape[1:]) for t in r.tensors]),
            )
        )
    if row is not None and row.has_root:
        checks.append((f"{kind.name} root ranks", lambda request: request.root))
    if kind is Kind.ADD_PROCESS_SET:
        checks.append(("ranks of the new process set", lambda request: list(request.ranks)))
    if kind is Kind.REMOVE_PROCESS_SET:
        checks.append(("process sets to remove", lambda request: request.root))
    checks.append((f"{kind.name} CPU/GPU device selection", lambda request: request.device.split(":")[0]))
    return checks


def _semantics(first: Request, members: Sequence[int], requests: Sequence[Request], joined: Sequence[int]) -> str:
    row = COLLECTIVES.get(first.kind)
    if joined and (row.needs_all if row is not None else first.kind in _SETS):
        verb = first.kind.name.capitalize().replace("_", " ")
        return f"{verb} is not supported with Join at this time: ranks {list(joined)} have joined." + _sites(
            members, requests
        )
    if row is not None and row.has_root and first.root in joined:
        what = f"{first.label} with root rank {first.root}"
        return f"{what}, which has called join() and takes no part." + _sites(members, requests)
    return ""


def describe_waiting(request: Request, times: int = 0) -> str:
    """Return a short name for a request: the user's term, its operation, its name and its place in the user's code.
    ``times`` is how often the rank has submitted it; 0 if that is not known.
    """
    words = labels.in_words(request.name.partition(".")[2], times)
    return f"{words}{': ' * bool(words)}{request.label} ({request.site})"


def _one_or_all(values: Sequence[object]) -> object:
    return values[0] if len(values) == 1 else list(values)


def _report(
    noun: str, first: Request, members: Sequence[int], requests: Sequence[Request], values: Sequence[object]
) -> str:
    others = [value for value in values if value != values[0]]
    lines = [f"Mismatched {noun}: One rank had {values[0]}, another had {others[0]}, in {first.label}."]
    if not first.name:
        matched = "Unnamed operations match in the order in which each rank calls them"
        left_out = (
            ". Most likely a rank has left out one of these calls, by a condition that only some ranks meet, such as "
            "`if hvd.rank() == 0:`, or by a loop with fewer rounds; if only their order differs, give them a name=."
        )
        named = "." if first.kind in _SETS else "; give them a name=."
        lines.append(matched + (left_out if noun == "operations" else named))
    width = max(len(str(value)) for value in values)
    for rank, request, value in zip(members, requests, values, strict=True):
        shown = "" if noun == "operations" else f"{value!s:<{width}}  "
        lines.append(f"  rank {rank}: {shown}{request.kind.name.lower()} at {request.site}")
    return "\n".join(lines)


def _sites(members: Sequence[int], requests: Sequence[Request]) -> str:
    return "".join(f"\n  rank {rank}: at {request.site}" for rank, request in zip(members, requests, strict=True))
