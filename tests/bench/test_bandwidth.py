"""The memory limit is a plausible figure, of the machine and not of one rank."""

from __future__ import annotations

from bench_doubles import LocalControl

from horovod.bench.bandwidth import memory_bandwidth


def test_bandwidth_is_measured() -> None:
    assert memory_bandwidth(LocalControl(), largest=1 << 20) > 0
