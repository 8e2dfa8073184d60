"""Sizes, elements, expected values and bandwidth formulas, worked by hand."""

from __future__ import annotations

import pytest

from horovod.bench.cases import (
    DEFAULT_SIZES,
    OPS,
    Case,
    format_seconds,
    input_blocks,
    output_blocks,
    parse_bytes,
    parse_sizes,
)
from horovod.phrases import format_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64", 64), ("64K", 65536), ("4MiB", 4 << 20), ("1 gb", 1 << 30), ("8b", 8)]
)
def test_sizes_are_read_with_binary_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "K", "-1", "1.5M", "4T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_a_range_grows_fourfold_and_ends_where_it_says() -> None:
    assert parse_sizes("64:1000,1M") == (64, 256, 1000, 1 << 20)


def test_default_sizes_span_what_the_documentation_says() -> None:
    assert (DEFAULT_SIZES[0], DEFAULT_SIZES[-1]) == (64, 256 << 20)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.123e-6, "7.12 µs"), (1.05e-3, "1.05 ms"), (0.0123, "12.3 ms"), (0.274, "274 ms"), (2, "2.00 s")],
)
def test_seconds_are_written_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(64, "64 B"), (1536, "1.5 KiB"), (1 << 28, "256 MiB"), (3 << 40, "3072 GiB")]
)
def test_bytes_are_written_with_a_fitting_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_every_rank_gets_a_whole_number_of_elements() -> None:
    assert Case("alltoall", 64).count(3) == 18
    assert Case("allreduce", 1, "float64").count(2) == 2


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_expected_values_are_those_of_a_simulation(op: str, size: int) -> None:
    inputs = [input_blocks(op, rank, size) for rank in range(size)]
    for rank in range(size):
        got = output_blocks(op, rank, size)
        if op == "alltoall":
            assert got == [inputs[peer][rank] for peer in range(size)]
        elif op == "allgather":
            assert got == [block for blocks in inputs for block in blocks]
        elif op == "broadcast":
            assert got == inputs[0]
        else:
            assert got == [sum(blocks[0] for blocks in inputs)]


def test_memory_of_a_case_counts_inputs_and_outputs() -> None:
    assert Case("allreduce", 1024).memory_bytes(4) == 2048
    assert Case("allgather", 1024).memory_bytes(4) == 5 * 1024
    assert Case("async", 1024, batch=50).memory_bytes(2) == 2 * 50 * 1024
