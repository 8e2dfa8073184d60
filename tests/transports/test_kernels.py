"""The kernels of torch and of numpy against exact arithmetic, and against each other."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.core.collectives import REDUCIBLE
from horovod.core.requests import ITEMSIZE, ReduceOp
from horovod.transports import kernels_torch
from horovod.transports.kernels_numpy import numpy_dtype
from horovod.transports.kernels_torch import DTYPES, TorchKernels
from horovod.transports.libraries import kernels_named

exact = settings(max_examples=60)
LIBRARIES = ["torch", "numpy"]
INTEGERS = [dtype for dtype in ITEMSIZE if "int" in dtype]
FLOATS = [dtype for dtype in ITEMSIZE if "float" in dtype]
COMPLEX = ["complex64", "complex128"]
HALVES = ["float16", "bfloat16"]
WORLD = [(library, dtype) for library in LIBRARIES for dtype in ITEMSIZE]
SHARED = [
    pytest.param(dtype, op, id=f"{dtype}-{op.name}")
    for dtype in [*FLOATS, *COMPLEX, *INTEGERS]
    for op in ReduceOp
    if op in REDUCIBLE[dtype] and op is not ReduceOp.ADASUM
]


def _make(library: str, dtype: str, values: Any) -> Any:
    wide = np.array(values)
    return torch.from_numpy(wide).to(DTYPES[dtype]) if library == "torch" else wide.astype(numpy_dtype(dtype))


def _back(buffer: Any) -> np.ndarray[Any, Any]:
    if isinstance(buffer, torch.Tensor):
        return buffer.to(torch.float64).numpy() if buffer.dtype is torch.bfloat16 else buffer.numpy()
    array = np.asarray(buffer)
    return array.astype(np.float64) if array.dtype.name == "bfloat16" else array


def _reduce(
    library: str, dtype: str, op: ReduceOp, rows: Any, prescale: float = 1.0, postscale: float = 1.0
) -> np.ndarray[Any, Any]:
    """Reduce rows, into a fresh buffer and into each of the first two; all three must agree."""
    kernels = kernels_named(library)
    reducer = kernels.reducer(dtype, op, prescale, postscale, len(rows))
    fresh = kernels.scratch(dtype, len(rows[0]))
    reducer(fresh, [_make(library, dtype, row) for row in rows])
    for place in range(min(2, len(rows))):
        srcs = [_make(library, dtype, row) for row in rows]
        reducer(srcs[place], srcs)
        np.testing.assert_array_equal(_back(srcs[place]), _back(fresh), err_msg=f"in place of source {place}")
        for other in set(range(len(rows))) - {place}:
            np.testing.assert_array_equal(_back(srcs[other]), _back(_make(library, dtype, rows[other])))
    make = kernels.maker(dtype, op, prescale, postscale, len(rows)) if len(rows) > 1 else None
    if make is not None:
        np.testing.assert_array_equal(_back(make([_make(library, dtype, row) for row in rows])), _back(fresh))
    return _back(fresh)


def _rows(values: Any, ranks: int) -> Any:
    row = st.lists(values, min_size=4, max_size=4)
    return st.lists(row, min_size=1, max_size=ranks)


def _trunc_div(value: int, by: int) -> int:
    return math.trunc(Fraction(value, by))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, type("Mine", (torch.Tensor,), {})])
def test_a_result_that_torch_makes_is_an_ordinary_tensor(kind: Any) -> None:
    make = kernels_named("torch").maker("float32", ReduceOp.SUM, 1.0, 1.0, 2)
    assert make is not None
    source = torch.ones(3).as_subclass(kind)
    with torch.inference_mode():
        inside = make([source, torch.ones(3)])
    for found in (inside, make([source, torch.ones(3)])):
        assert type(found) is torch.Tensor
        assert not found.is_inference()
        assert found.tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_integers_are_exact_and_averages_truncate_toward_zero(library: str, dtype: str) -> None:
    low = 0 if dtype.startswith("u") else -4

    @exact
    @given(rows=_rows(st.integers(low, 4), 5))
    def check(rows: list[list[int]]) -> None:
        columns = list(zip(*rows, strict=True))
        # 4 ** 5 does not fit into eight bits: sums and products wrap around there, as everywhere.
        wrap = np.iinfo(dtype)

        def wrapped(value: int) -> int:
            return (value - int(wrap.min)) % (1 << wrap.bits) + int(wrap.min)

        assert _reduce(library, dtype, ReduceOp.SUM, rows).tolist() == [sum(c) for c in columns]
        assert _reduce(library, dtype, ReduceOp.MIN, rows).tolist() == [min(c) for c in columns]
        assert _reduce(library, dtype, ReduceOp.MAX, rows).tolist() == [max(c) for c in columns]
        assert _reduce(library, dtype, ReduceOp.PRODUCT, rows).tolist() == [wrapped(math.prod(c)) for c in columns]
        assert _reduce(library, dtype, ReduceOp.AVERAGE, rows).tolist() == [_trunc_div(sum(c), len(c)) for c in columns]

    check()


@pytest.mark.parametrize("library", LIBRARIES)
def test_large_integers_do_not_go_through_floats(library: str) -> None:
    big = (1 << 62) + 1
    assert _reduce(library, "int64", ReduceOp.SUM, [[big], [1], [-2]]).tolist() == [big - 1]
    assert _reduce(library, "int64", ReduceOp.AVERAGE, [[big], [1], [0]]).tolist() == [(big + 1) // 3]
    assert _reduce(library, "int64", ReduceOp.AVERAGE, [[-big], [-1], [0]]).tolist() == [-((big + 1) // 3)]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint32"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_scaled_integers_truncate_toward_zero(library: str, dtype: str) -> None:
    rows = [[7, 6, 1], [5, 5, 0]]
    assert _reduce(library, dtype, ReduceOp.SUM, rows, prescale=0.5).tolist() == [5, 5, 0]
    assert _reduce(library, dtype, ReduceOp.SUM, rows, postscale=0.5).tolist() == [6, 5, 0]
    assert _reduce(library, dtype, ReduceOp.AVERAGE, rows, postscale=0.5).tolist() == [3, 2, 0]
    assert _reduce(library, dtype, ReduceOp.MAX, rows, prescale=0.5).tolist() == [3, 3, 0]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE], ids=lambda op: op.name)
@pytest.mark.parametrize(("library", "dtype"), [world for world in WORLD if world[1] in ("float16", "bfloat16")])
def test_halves_add_up_in_float32_and_round_once(library: str, dtype: str, op: ReduceOp) -> None:

    @exact
    @given(rows=_rows(st.integers(-2000, 2000), 6))
    def check(rows: list[list[int]]) -> None:
        halves = [torch.tensor(row, dtype=torch.float32).div(7).to(DTYPES[dtype]) for row in rows]
        total = torch.stack([half.to(torch.float32) for half in halves]).numpy()
        want = total[0].copy()
        for row in total[1:]:
            want += row
        if op is ReduceOp.AVERAGE:
            want /= np.float32(len(rows))
        wanted = torch.from_numpy(want).to(DTYPES[dtype])
        got = _reduce(library, dtype, op, [half.to(torch.float64).numpy() for half in halves])
        np.testing.assert_array_equal(got, _back(wanted))

    check()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
@exact
@given(rows=_rows(st.floats(-1e6, 1e6, width=32), 5))
def test_floats_add_up_in_rank_order(library: str, dtype: str, rows: list[list[float]]) -> None:
    want = np.asarray(rows[0], dtype=dtype)
    for row in rows[1:]:
        want = want + np.asarray(row, dtype=dtype)
    np.testing.assert_array_equal(_reduce(library, dtype, ReduceOp.SUM, rows), want)
    scaled = _reduce(library, dtype, ReduceOp.AVERAGE, rows, prescale=0.5, postscale=3.0)
    exactly = np.asarray(rows, dtype=np.longdouble).sum(0) * 1.5 / len(rows)
    tolerance = 1e-6 if dtype == "float32" else 1e-15
    np.testing.assert_allclose(scaled, exactly, rtol=tolerance, atol=5 * tolerance * max(1e-30, np.abs(rows).max()))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_floats_are_scaled_before_they_are_added(library: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(-100, 100, (3, 200)).astype(dtype)
    factor = rows.dtype.type(0.19151945)
    want = rows[0] * factor + rows[1] * factor + rows[2] * factor
    np.testing.assert_array_equal(_reduce(library, dtype, ReduceOp.SUM, rows, prescale=0.19151945), want)
    # Values that would overflow without the factor do not.
    big = float(np.finfo(dtype).max)
    assert _reduce(library, dtype, ReduceOp.SUM, [[big], [big], [0.0]], prescale=0.25).tolist() == [big / 2]


@pytest.mark.parametrize(("dtype", "op"), SHARED)
def test_torch_and_numpy_give_the_same_bits(dtype: str, op: ReduceOp) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 7, 100) * (1 + 0.25 * ("int" not in dtype)) for _ in range(4)]
    for scale in (1.0, 0.5):
        left, right = (_reduce(library, dtype, op, rows, prescale=scale) for library in LIBRARIES)
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("count", [1, 3, 70_000])
@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not ReduceOp.ADASUM], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_of_numpy_have_the_bits_of_torch(dtype: str, op: ReduceOp, count: int) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.standard_normal(count) * 10.0 ** rng.integers(-5, 4, count)).astype(np.float32) for _ in range(3)]
    for prescale, postscale in [(1.0, 1.0), (0.3, 1.0), (1.0, 0.7)]:
        left, right = (_reduce(library, dtype, op, rows, prescale, postscale) for library in LIBRARIES)
        np.testing.assert_array_equal(left, right)
    for factor in (1.0, 0.25):
        copies = []
        for library in LIBRARIES:
            kernels = kernels_named(library)
            copies.append(kernels.scratch(dtype, count))
            kernels.copier(dtype, factor)(copies[-1], _make(library, dtype, rows[0]))
        np.testing.assert_array_equal(*(_back(copy) for copy in copies))


@pytest.mark.parametrize("dtype", HALVES)
def test_inner_products_and_combinations_of_halves(dtype: str) -> None:
    rows = [[1.5, -2.0, 0.25], [3.0, 0.5, 8.0]]
    for library in LIBRARIES:
        kernels, made = kernels_named(library), [_make(library, dtype, row) for row in rows]
        assert kernels.gram(made) == [[6.3125, 5.5], [5.5, 73.25]]
        combined = kernels.scratch(dtype, 3)
        kernels.combine(combined, made, [2.0, 0.5])
        assert _back(combined).tolist() == [4.5, -3.75, 4.5]


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_average_over_more_ranks_than_eight_bits_count(library: str) -> None:
    for dtype, rows, want in [
        ("int8", [[-1, 100]] + [[-1, 0]] * 127, [-1, 0]),
        ("int8", [[0, 100]] + [[-1, 0]] * 199, [0, 0]),
        ("uint8", [[1, 100]] + [[1, 0]] * 299, [1, 0]),
    ]:
        assert _reduce(library, dtype, ReduceOp.AVERAGE, rows).tolist() == want


def test_kernels_of_a_name_that_nobody_has_are_an_error() -> None:
    with pytest.raises(LookupError, match=r"'numpy' or 'torch'.* 'jax'"):
        kernels_named("jax")


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(np, "dtype", lambda name: (_ for _ in ()).throw(TypeError(name)))
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        numpy_dtype.__wrapped__("bfloat16")


@pytest.mark.parametrize("library", LIBRARIES)
def test_truth(library: str) -> None:
    rows = [[True, True, False, False], [True, False, True, False], [True, True, True, False]]
    every, some = [True, False, False, False], [True, True, True, False]
    for op, want in [
        (ReduceOp.SUM, some),
        (ReduceOp.MAX, some),
        (ReduceOp.MIN, every),
        (ReduceOp.PRODUCT, every),
    ]:
        assert _reduce(library, "bool", op, rows).tolist() == want


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_not_a_number_is_contagious(library: str, dtype: str, op: ReduceOp) -> None:
    got = _reduce(library, dtype, op, [[1.0, math.nan], [math.nan, 2.0], [3.0, 4.0]])
    assert np.isnan(got).all()


@pytest.mark.parametrize(("library", "dtype"), WORLD)
def test_views_share_memory(library: str, dtype: str) -> None:
    kernels = kernels_named(library)
    memory = bytearray(64)
    first = kernels.view(memory, 16, dtype, (2,))
    second = kernels.view(memory, 16, dtype, (2, 1))
    kernels.copy(first, _make(library, dtype, [1, 0]))
    assert _back(second).reshape(-1).tolist() == [1, 0]
    assert tuple(kernels.view(memory, 64, dtype, (0, 3)).shape) == (0, 3)
    assert first.nbytes == 2 * ITEMSIZE[dtype]
    assert kernels.scratch(dtype, 5).shape == (5,)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_overflow_is_a_result_even_where_numpy_raises(library: str, dtype: str) -> None:
    big = float(np.finfo(dtype).max)
    with np.errstate(all="raise"):
        assert _reduce(library, dtype, ReduceOp.SUM, [[big], [big]]).tolist() == [math.inf]
        assert np.isnan(_reduce(library, dtype, ReduceOp.SUM, [[math.inf], [-math.inf]])).all()
        assert _reduce(library, dtype, ReduceOp.PRODUCT, [[big], [big], [2.0]]).tolist() == [math.inf]
        assert _reduce(library, dtype, ReduceOp.MAX, [[big], [1.0]], postscale=4.0).tolist() == [math.inf]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_overflow_is_a_result_in_one_step_too_and_others_may_raise(library: str, dtype: str) -> None:
    kernels = kernels_named(library)
    big = _make(library, dtype, [float(np.finfo(dtype).max)])
    add, copy = kernels.reducer(dtype, ReduceOp.SUM, 1.0, 1.0, 2), kernels.copier(dtype, 4.0)
    found = kernels.scratch(dtype, 1)
    with np.errstate(all="raise"):
        add(found, [big, big])
        assert _back(found).real.tolist() == [math.inf]
        copy(found, big)
        assert _back(found).real.tolist() == [math.inf]
        with pytest.raises(FloatingPointError):
            np.add(np.array([3e38], "float32"), np.array([3e38], "float32"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_scaled_integer_out_of_range_raises_nothing(library: str) -> None:
    with np.errstate(all="raise"):
        _reduce(library, "int32", ReduceOp.SUM, [[7], [7]], prescale=1e30)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "op", "prescale"),
    [
        ("int32", ReduceOp.AVERAGE, 1.0),
        ("int32", ReduceOp.SUM, 0.7),
        ("float32", ReduceOp.SUM, 0.7),
        ("float32", ReduceOp.MAX, 0.7),
        ("float16", ReduceOp.AVERAGE, 1.0),
        ("float16", ReduceOp.SUM, 0.7),
        ("bfloat16", ReduceOp.AVERAGE, 1.0),
        ("bfloat16", ReduceOp.AVERAGE, 0.7),
    ],
)
def test_what_is_reduced_in_blocks_has_no_seams(ranks: int, dtype: str, op: ReduceOp, prescale: float) -> None:
    count, piece = 100_001, 999
    rng = np.random.default_rng(1)
    rows = [(rng.standard_normal(count) * 100).round(3) for _ in range(ranks)]
    whole = _reduce("torch", dtype, op, rows, prescale)
    pieces = [_reduce("torch", dtype, op, [r[i : i + piece] for r in rows], prescale) for i in range(0, count, piece)]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))


@pytest.mark.parametrize("shape", [(), (1,), (100,)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_factors_that_never_repeat_leave_no_tensors_and_count_the_same(
    dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may have met different factors before, such as in process sets; all must get the same bits."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(kernels_torch, "_constants", kept)
    library, chance = TorchKernels(), torch.Generator().manual_seed(1)
    srcs = [torch.randn(shape, generator=chance, dtype=torch.float64).to(DTYPES[dtype]) for _ in range(3)]

    def bits(factor: float, count: int) -> list[bytes]:
        out, found = torch.empty_like(srcs[0]), []
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            for prescale, postscale in [(factor, 1.0), (1.0, factor), (factor, factor)]:
                TorchKernels.reducer.__wrapped__(library, dtype, op, prescale, postscale, count)(out, srcs[:count])
                found.append(library.raw(out).tobytes())
        TorchKernels.copier.__wrapped__(library, dtype, factor)(out, srcs[0])
        return [*found, library.raw(out).tobytes()]

    for factor in (0.1, 1 / 3, 0.5, 1e-3, 3.0):
        with_tensors = [bits(factor, count) for count in (2, 3)]
        with monkeypatch.context() as patch:
            patch.setattr(kernels_torch, "_constants", {})
            patch.setattr(kernels_torch, "_MOST_CONSTANTS", 0)
            assert [bits(factor, count) for count in (2, 3)] == with_tensors
    for number in range(200):
        bits(1 + 1 / (number + 2), 2)
    assert len(kept) <= 64


def test_bytes_of_one_element_whatever_its_stride() -> None:
    one = torch.tensor([1, 2, 3, 4])[1::2][1:]
    assert one.is_contiguous() and one.stride() == (2,)
    assert bytes(kernels_named("torch").raw(one)) == (4).to_bytes(8, sys.byteorder)
    assert bytes(kernels_named("torch").raw(torch.zeros(0, 3))) == b""
