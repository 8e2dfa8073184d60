"""The table of collectives: shapes of results, and that each transport has a routine for each kind."""

from __future__ import annotations

import pytest

from horovod.core.collectives import COLLECTIVES, Collective, check, keeps_shape, result_shapes
from horovod.core.mismatch import compare
from horovod.core.requests import Kind, Request, Response, TensorSpec
from horovod.transports import on_device
from horovod.transports.hierarchical import transport as hierarchical
from horovod.transports.shm import inline
from horovod.transports.shm import transport as shm

_MEMBERS = (0, 1, 2)


def _response(kind: Kind, *rows: int, splits: tuple[tuple[int, ...], ...] = ()) -> Response:
    requests = [
        Request("x", kind, tensors=(TensorSpec("float32", (count, 2)),), splits=splits[i] if splits else ())
        for i, count in enumerate(rows)
    ]
    return Response(kind, "x", 0, _MEMBERS, 3, tuple(requests))


@pytest.mark.parametrize(
    ("response", "shapes"),
    [
        (_response(Kind.ALLREDUCE, 4), [(4, 2)] * 3),
        (_response(Kind.BROADCAST, 4), [(4, 2)] * 3),
        (_response(Kind.ALLGATHER, 4, 0, 1), [(5, 2)] * 3),
        (_response(Kind.REDUCESCATTER, 4), [(2, 2), (1, 2), (1, 2)]),
        (_response(Kind.ALLTOALL, 3, 3, 3), [(3, 2)] * 3),
        (
            _response(Kind.ALLTOALL, 3, 1, 0, splits=((0, 1, 2), (1, 0, 0), (0, 0, 0))),
            [(1, 2), (1, 2), (2, 2)],
        ),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Response) else "",
)
def test_the_shapes_of_results(response: Response, shapes: list[tuple[int, ...]]) -> None:
    assert [result_shapes(response, me)[0] for me in range(3)] == shapes
    assert keeps_shape(response.kind) is (response.kind in (Kind.ALLREDUCE, Kind.BROADCAST))


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name)
def test_every_transport_moves_every_collective(kind: Kind) -> None:
    assert kind in inline.ROUTINES
    assert kind in shm.ROUTINES
    assert kind in hierarchical.ROUTINES
    assert kind in on_device.ROUTINES


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name)
def test_a_tensor_without_dimensions_has_no_rows(kind: Kind) -> None:
    error = check(Request("x", kind, tensors=(TensorSpec("float32", ()),)), _MEMBERS, 0)
    assert ("without dimensions" in error) is COLLECTIVES[kind].has_rows


def test_any_kind_can_have_a_root_to_which_all_ranks_send(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Collective(COLLECTIVES[Kind.ALLGATHER].shape, has_rows=True, rows_differ=True, has_root=True)
    monkeypatch.setitem(COLLECTIVES, Kind.ALLGATHER, row)
    first, second, wrong = (
        Request("x", Kind.ALLGATHER, tensors=(TensorSpec("float32", (1,)),), root=root) for root in (0, 1, 7)
    )
    assert "allgather received invalid root rank 7" in check(wrong, _MEMBERS, 0)
    assert "Mismatched ALLGATHER root ranks" in compare((0, 1), [first, second])
    assert "root rank 1, which has called join()" in compare((0, 2), [second, second], joined=(1,))
    assert not row.root_sends
