"""CPU that an initialised job uses while its ranks sleep.

horovodrun -np 2 python benchmarks/idle.py [SECONDS]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.torch as hvd


def _wakeups() -> int:
    """Return how often the threads of this process went to sleep so far."""
    lines = [line for path in Path("/proc/self/task").glob("*/status") for line in path.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def main(seconds: float) -> None:
    """Sleep, then print what the other threads of each rank used meanwhile."""
    hvd.init()
    hvd.barrier()
    time.sleep(seconds / 10)
    # The sleeping thread is left out: it belongs to this benchmark.
    start, cpu, wakeups = time.monotonic(), time.process_time() - time.thread_time(), _wakeups()
    time.sleep(seconds)
    elapsed = time.monotonic() - start
    used = (time.process_time() - time.thread_time() - cpu, _wakeups() - wakeups)
    for rank, (cpu_s, woken) in enumerate(hvd.allgather_object(used)):
        if hvd.rank() == 0:
            print(f"rank {rank}: {cpu_s / elapsed:.3%} of a core, {woken / elapsed:.1f} wake-ups per second")
    hvd.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
