"""One rank of a job whose start is measured: ``horovod`` or ``gloo``; says how long each part took."""

from __future__ import annotations

import sys
import time

from horovod.bench.events import LineReporter

__all__ = ["main"]


def _horovod() -> dict[str, float]:
    clock = time.perf_counter
    marks = [clock()]
    import horovod.torch as hvd

    marks.append(clock())
    hvd.init()
    marks.append(clock())
    hvd.shutdown()
    marks.append(clock())
    names = ("rank: import horovod.torch", "rank: hvd.init()", "rank: hvd.shutdown()")
    return {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}


def _gloo() -> dict[str, float]:
    clock = time.perf_counter
    marks = [clock()]
    import torch.distributed as dist

    marks.append(clock())
    dist.init_process_group("gloo")
    marks.append(clock())
    names = ("rank: import torch.distributed", "rank: init_process_group('gloo')")
    parts = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
    dist.barrier()  # a rank that left while another still connects would make that one fail
    began = clock()
    dist.destroy_process_group()
    return {**parts, "rank: destroy_process_group()": clock() - began}


def main(argv: list[str]) -> int:
    """Start, report, end."""
    parts = _horovod() if argv == ["horovod"] else _gloo()
    LineReporter()({"event": "parts", "parts": parts})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
