"""Averages: equal tensors average to themselves by every route, and integers do not overflow; beside numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance_jobs import pretend
from harness import on_ranks, run_ranks
from later import later

from horovod.core.requests import ITEMSIZE, ReduceOp
from horovod.errors import HorovodInternalError
from horovod.transports.kernels_numpy import numpy_dtype
from horovod.transports.kernels_torch import DTYPES
from horovod.transports.libraries import kernels_named

hvd, torch = later("horovod.torch"), later("torch")

RANKS = [2, 3, 4, 5, 6]
NUMBERS = [dtype for dtype in ITEMSIZE if dtype != "bool"]
#: float32 elements: sent inline, staged, and written by all ranks to new results.
_COUNTS = (1_000, 300_000, 600_000)


def _values(dtype: str, count: int) -> Any:
    """Return values that use all digits of their type, and for integers the ends of its range."""
    rng, kind = np.random.default_rng(count), numpy_dtype(dtype)
    if "int" in dtype:
        ends = np.iinfo(kind)
        found = rng.integers(ends.min, ends.max, count, kind, endpoint=True)
        found[:2] = ends.min, ends.max
        return torch.from_numpy(found)
    found = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
    if "complex" in dtype:
        found = found + 1j * found[::-1]
    return torch.from_numpy(found).to(DTYPES[dtype])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_equal_tensors_average_to_themselves(library: str, dtype: str, ranks: int) -> None:
    kernels, value = kernels_named(library), _values(dtype, 70_000)
    source = kernels.view(bytearray(kernels_named("torch").raw(value)), 0, dtype, (70_000,))
    target = kernels.scratch(dtype, 70_000)
    kernels.reducer(dtype, ReduceOp.AVERAGE, 1.0, 1.0, ranks)(target, [source] * ranks)
    np.testing.assert_array_equal(kernels.raw(target), kernels.raw(source))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [dtype for dtype in NUMBERS if "int" in dtype])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_averages_of_any_integers_are_those_of_python(library: str, dtype: str, ranks: int) -> None:
    kernels, rows = kernels_named(library), [_values(dtype, 500 + rank) for rank in range(ranks)]
    raw = [bytearray(kernels_named("torch").raw(row)) for row in rows]
    target = kernels.scratch(dtype, 500)
    kernels.reducer(dtype, ReduceOp.AVERAGE, 1.0, 1.0, ranks)(
        target, [kernels.view(memory, 0, dtype, (500,)) for memory in raw]
    )
    sums = [sum(map(int, column)) for column in zip(*(row[:500].numpy() for row in rows), strict=True)]
    wanted = [abs(total) // ranks * (1 if total >= 0 else -1) for total in sums]
    assert np.asarray(target).tolist() == wanted


def _averages_of_equal_tensors(hosts: tuple[tuple[int, ...], ...] = ()) -> None:
    if hosts:
        pretend(hosts, hvd.init)
    for dtype in ("float32", "float64", "bfloat16", "float16", "int32", "int64", "complex64"):
        for count in _COUNTS:
            value = _values(dtype, count)
            if hosts and dtype == "int64":
                value //= 8  # larger ones are refused
            name = f"{dtype}.{count}"
            found = [
                hvd.allreduce(value, name=f"new.{name}"),
                hvd.allreduce_(value.clone(), name=f"in place.{name}"),
                *hvd.grouped_allreduce([value, value[:7]], name=f"grouped.{name}"),
            ]
            if value.is_floating_point():
                placed = hvd.zeros(count, dtype=value.dtype)
                placed.copy_(value)
                found.append(hvd.allreduce_(placed, name=f"arena.{name}"))
            handles = [hvd.allreduce_async(value + 0, name=f"fused.{n}.{name}") for n in range(3)]
            found += [hvd.synchronize(handle) for handle in handles]
            for one in found:
                assert torch.equal(one, value[: len(one)]), name
            part = hvd.reducescatter(value, name=f"part.{name}")
            start = _start(count)
            assert torch.equal(part, value[start : start + len(part)]), name
    for factor in (0.3, 3.0, 1.0 / 3.0):
        value = _values("float32", 1000)
        wanted = factor * value
        assert torch.equal(hvd.allreduce(value, prescale_factor=factor, name=f"pre.{factor}"), wanted)
        assert torch.equal(hvd.allreduce(value, postscale_factor=factor, name=f"post.{factor}"), wanted)
        half = _values("float16", 1000)
        assert torch.equal(hvd.allreduce(half, prescale_factor=factor, name=f"half.{factor}"), factor * half)
    big = torch.full((5,), 2_000_000_000, dtype=torch.int32)
    assert hvd.allreduce(big, postscale_factor=0.5, name="big").tolist() == [1_000_000_000] * 5
    share = {"op": hvd.Sum, "postscale_factor": 1 / 8}
    for full in (big, torch.full((5000,), 200, dtype=torch.uint8), torch.full((300_000,), -120, dtype=torch.int8)):
        wanted = torch.full_like(full, int(int(full[0]) * hvd.size() / 8))
        assert torch.equal(hvd.allreduce(full, name=f"share.{full.dtype}", **share), wanted)
        part = hvd.reducescatter(full, name=f"part of a share.{full.dtype}", **share)
        assert torch.equal(part, wanted[: len(part)])


def _start(count: int) -> int:
    whole, more = divmod(count, hvd.size())
    return int(hvd.rank() * whole + min(hvd.rank(), more))


@pytest.mark.parametrize("ranks", RANKS)
def test_every_route_averages_equal_tensors_to_themselves(ranks: int) -> None:
    run_ranks(ranks, _averages_of_equal_tensors)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [((0, 1), (2,)), ((0,), (1,), (2,)), ((0, 1, 2), (3, 4))], ids=str)
def test_averages_between_hosts_are_those_of_one(hosts: tuple[tuple[int, ...], ...]) -> None:
    run_ranks(sum(map(len, hosts)), _averages_of_equal_tensors, hosts, init=False)


@pytest.mark.parametrize("how", [{}, {"op": ReduceOp.SUM, "postscale_factor": 0.5}], ids=["average", "scaled sum"])
@on_ranks(2, init=False, fresh=True)
def test_an_average_that_would_overflow_between_hosts_is_an_error(how: dict[str, Any]) -> None:
    pretend(((0,), (1,)), hvd.init)
    with pytest.raises(
        HorovodInternalError, match=r"^allreduce 'large': .* of int64 .* received 4611686018427387904|rank"
    ):
        hvd.allreduce(torch.full((100_000,), 1 << 62), name="large", **how)


@on_ranks(3, returns=[[0.0], [0.0], []])
def test_an_average_beside_a_joined_rank_is_rounded_once() -> list[float]:
    value = _values("float32", 1000)
    if hvd.rank() == 2:
        hvd.join()
        return []
    found = hvd.allreduce(value, name="joined")
    hvd.join()
    wanted = (2 * value.double() / 3).float()
    return [float((found - wanted).abs().max())]
