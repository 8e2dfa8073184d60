"""CPU that an initialised job uses while its ranks do nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from horovod.bench.control import Control
from horovod.bench.events import Tell

__all__ = ["run_idle"]


def _wakeups() -> int:
    """How often the threads of this process went to sleep so far, each of them a wake-up."""
    total = 0
    for status in Path("/proc/self/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:  # the thread has ended since it was listed
            continue
        for line in lines:
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def _cpu_s(pid: int) -> float:
    """CPU seconds that another process used so far, in steps of the kernel's tick; 0 when it is out of sight."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_of_other_threads() -> float:
    return time.process_time() - time.thread_time()


def run_idle(control: Control, tell: Tell, *, seconds: float = 10.0) -> list[dict[str, Any]]:
    """Let every rank sleep for ``seconds`` and read what it used; called on all ranks.

    What the sleeping thread used is left out: it is this benchmark's, and to run at all after a pause takes
    milliseconds on some machines.

    Returns:
        A row per rank and one for the process that started rank 0: CPU seconds, share of a core, wake-ups
        per second.
    """
    control.barrier()
    tell(0, 1, f"idle for {seconds:g} s")
    time.sleep(min(1.0, seconds / 10))
    start, cpu, wakeups, parent = time.monotonic(), _cpu_of_other_threads(), _wakeups(), _cpu_s(os.getppid())
    time.sleep(seconds)
    elapsed, cpu, wakeups = time.monotonic() - start, _cpu_of_other_threads() - cpu, _wakeups() - wakeups
    parent = _cpu_s(os.getppid()) - parent
    rows: list[dict[str, Any]] = []
    for rank, (spent, woken, passed) in enumerate(control.gather((cpu, wakeups, elapsed))):
        rows.append({"name": f"rank {rank}", "cpu_s": spent, "core_share": spent / passed, "wakeups_s": woken / passed})
    launcher = {"name": "launcher", "cpu_s": parent, "core_share": parent / elapsed, "wakeups_s": None}
    tell(1, 1, "done")
    return [*rows, launcher]
