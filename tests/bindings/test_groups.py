"""Several tensors as one operation, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks

import horovod.numpy as hvd
from horovod.bindings.submission import find_overlaps
from horovod.errors import RequestError


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("elements", [3, 32_768, 1 << 20])
@pytest.mark.parametrize("in_arena", [False, True], ids=["ordinary", "arena"])
@on_ranks()
def test_a_tensor_that_is_named_twice_is_reduced_once(elements: int, in_arena: bool) -> None:
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) / 2
    for turn in range(2):
        tied = hvd.zeros(elements) if in_arena else np.zeros(elements)
        other = np.full(3, float(turn))
        tied[:] = rank + 1
        first, second, third = hvd.grouped_allreduce_([tied, other, tied], op=hvd.Sum, name="tied")
        assert first is third is tied
        assert second is other
        np.testing.assert_array_equal(tied, np.full(elements, total))
        np.testing.assert_array_equal(other, np.full(3, turn * size))


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ([(0, 8), (8, 8)], {}),
        ([(8, 8), (0, 9)], {0: 1}),
        ([(0, 8), (0, 8), (0, 8)], {1: 0, 2: 0}),
        ([(4, 2), (0, 16), (15, 4), (16, 4)], {0: 1, 2: 1}),
        ([(0, 0), (0, 8), (4, 0)], {}),
    ],
)
def test_what_stays_in_its_place_shares_no_byte(places: list[tuple[int, int]], moved: dict[int, int]) -> None:
    assert find_overlaps(places) == moved


@pytest.mark.parametrize(("elements", "in_arena"), [(64, False), (1 << 20, False), (1 << 17, True)])
@on_ranks(2)
def test_views_of_one_tensor_in_one_group_get_the_same_values(elements: int, in_arena: bool) -> None:
    size, rank = hvd.size(), hvd.rank()
    for turn in range(2):
        whole = hvd.zeros(elements) if in_arena else np.zeros(elements)
        values = np.arange(elements) + turn
        whole[:] = values * (rank + 1)
        # Another order on every rank, as far as the shapes allow it.
        views = [whole[: elements // 2], whole[elements // 4 : elements // 4 + elements // 2], whole.reshape(2, -1)]
        found = hvd.grouped_allreduce_(views, op=hvd.Sum)
        assert [a is b for a, b in zip(found, views, strict=True)] == [True] * 3
        np.testing.assert_array_equal(whole, values * (size * (size + 1) / 2))
    refused: list[Any] = [[whole, whole.view(np.int64)], [whole, whole[1:]]]
    for group, op in zip(refused, [hvd.Sum, hvd.Adasum], strict=True):
        with pytest.raises(RequestError, match=r"tensors 0 and 1 of a group in place share memory.*clone\(\)"):
            hvd.grouped_allreduce_(group, op=op)
    hvd.barrier()


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_empty_tensors_and_scalars_anywhere() -> None:
    """Groups with empty tensors at every place, and scalars, small and large, under every operation."""
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) / 2
    for count in (5, 600_000):
        some = np.full(count, rank + 1.0)
        none, scalar, flat = np.empty((0, 3)), np.array(rank + 1.0), np.empty((4, 0))
        groups = [[none, some], [some, none, flat, some.copy()], [none, flat], [scalar, none], [none, none, scalar]]
        for group in groups:
            for op in (hvd.Sum, hvd.Min, hvd.Adasum):
                for out in (
                    hvd.grouped_allreduce(group, op=op),
                    hvd.grouped_allreduce_([a.copy() for a in group], op=op),
                ):
                    assert [o.shape for o in out] == [a.shape for a in group]
                    expected = {hvd.Sum: total, hvd.Min: 1.0}.get(op)
                    assert expected is None or all((o == expected).all() for o in out)
            for a, out in zip(group, hvd.grouped_allgather([np.atleast_1d(a) for a in group]), strict=True):
                assert out.shape == (size * np.atleast_1d(a).shape[0], *a.shape[1:])
            for a, out in zip(group, hvd.grouped_reducescatter([np.atleast_1d(a) for a in group]), strict=True):
                assert out.shape[1:] == a.shape[1:]
            for a in group:
                assert hvd.broadcast(a, 1).shape == a.shape
        handles = [
            hvd.allreduce_async(a, op=hvd.Sum, name=f"{i}") for i, a in enumerate([none, some, scalar, flat, some])
        ]
        assert [hvd.synchronize(handle).sum() for handle in handles] == [0, total * count, total, 0, total * count]
        # Nothing from one rank, something from the others.
        assert hvd.allgather(np.ones(count * rank)).shape == (count * size * (size - 1) // 2,)
        received, splits = hvd.alltoall(np.ones(count), splits=[count] + [0] * (size - 1))
        assert received.shape == ((count * size,) if rank == 0 else (0,))
        assert splits.tolist() == [count if rank == 0 else 0] * size
        in_arena = [hvd.zeros(0), hvd.zeros(count), hvd.zeros(0, 2)]
        hvd.grouped_allreduce_(in_arena, op=hvd.Adasum)
        hvd.grouped_allreduce_(in_arena, op=hvd.Sum)
