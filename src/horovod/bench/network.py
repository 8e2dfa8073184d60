"""Latency and bandwidth between each two hosts of a job, through horovod's own transports."""

from __future__ import annotations

import itertools
import time
from statistics import median
from typing import Any

import numpy as np

import horovod.numpy as hvd
from horovod.bench.control import Agreement, Tell
from horovod.world import detect

__all__ = ["run_network"]

_SMALL, _LARGE = 64, 64 << 20


def run_network(control: Agreement, tell: Tell, *, rounds: int = 7, large: int = _LARGE) -> list[dict[str, Any]]:
    """Measure each pair of hosts between the first ranks of both; called on all ranks. The median of the rounds counts.

    Return a row per pair: seconds of an allreduce of 64 bytes, and bytes per second of a broadcast of ``large`` bytes,
    in the slower direction.

    Raises:
        ValueError: all ranks are on one host.
    """
    names = control.gather(detect().hostname)
    first = {name: names.index(name) for name in dict.fromkeys(names)}
    if len(first) == 1:
        raise ValueError("bench network: expected several hosts, got one; name them with -H a:1,b:1")
    rows = []
    pairs = list(itertools.combinations(first.items(), 2))
    for number, ((one, lower), (other, upper)) in enumerate(pairs):
        tell(number, len(pairs), f"{one} and {other}")
        is_whole_job = control.size == 2
        process_set = hvd.global_process_set if is_whole_job else hvd.add_process_set([lower, upper])
        spent = _pair(process_set, (lower, upper), rounds, large) if control.rank in (lower, upper) else None
        latency_s, transfer_s = (max(each) for each in zip(*filter(None, control.gather(spent)), strict=True))
        rows.append({"hosts": f"{one}, {other}", "latency_s": latency_s, "bytes_s": large / transfer_s})
        if not is_whole_job:
            hvd.remove_process_set(process_set)
    tell(1, 1, "done")
    return rows


def _pair(process_set: Any, members: tuple[int, int], rounds: int, large: int) -> tuple[float, float]:
    """Return the seconds of a small allreduce and of a large broadcast in the slower direction."""
    number, data = np.zeros(_SMALL // 4, np.float32), np.zeros(large // 4, np.float32)
    small: list[float] = []
    big: dict[int, list[float]] = {root: [] for root in members}
    for _ in range(rounds + 1):
        hvd.barrier(process_set=process_set)
        start = time.perf_counter()
        for _ in range(20):
            hvd.allreduce_(number, name="bench.latency", op=hvd.Sum, process_set=process_set)
        small.append((time.perf_counter() - start) / 20)
        for root, spent in big.items():
            hvd.barrier(process_set=process_set)
            start = time.perf_counter()
            hvd.broadcast_(data, root, name="bench.bandwidth", process_set=process_set)
            spent.append(time.perf_counter() - start)
    # The first round opens connections.
    return median(small[1:]), max(median(spent[1:]) for spent in big.values())
