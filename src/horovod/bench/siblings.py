"""Whether the cores of the ranks are really theirs: hyperthreads of one core, and time that was stolen."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from horovod.bench.control import Control
from horovod.bench.host import Load
from horovod.processors import physical_cores, share_cores

__all__ = ["core_facts", "describe", "slowdown", "stolen_share"]

#: Additions in one measurement, about a millisecond of Python that needs nothing but the core.
_TURNS = 20_000
#: What two cores of their own may cost each other, by what they share besides.
_ALONE = 1.15
_STOLEN = 0.01


def core_facts(control: Control, root: Path = Path("/")) -> dict[str, Any]:
    """Return what the kernel says of the ranks' CPUs; called on all ranks.

    Args:
        control: how the ranks agree.
        root: where ``sys`` is.
    """
    allowed = [frozenset(cpus) for cpus in control.gather(sorted(os.sched_getaffinity(0)))]
    cpus = frozenset().union(*allowed)
    return {"cpus": len(cpus), "cores": physical_cores(cpus, root), "shared": share_cores(allowed, root)}


def slowdown(control: Control, rounds: int) -> float:
    """Return how much longer the same work takes on all ranks at once than on one at a time; called on all ranks.

    1 where each has a core of its own; up to 2 for two hyperthreads of one core, even if a virtual machine hides it.

    Args:
        control: how the ranks agree.
        rounds: how often it is measured.
    """
    together, alone = [], []
    for _ in range(rounds):
        control.barrier()
        together.append(_work_s())
        for rank in range(control.size):
            control.barrier()
            if rank == control.rank:
                alone.append(_work_s())
    ratios = control.gather(median(together) / median(alone))
    return sum(ratios) / len(ratios)


def _work_s() -> float:
    start, total = time.perf_counter(), 0
    for number in range(_TURNS):
        total += number
    return time.perf_counter() - start


def stolen_share(used: Load, cpus: int) -> float:
    """Return which part of the time of this machine's CPUs went to other virtual machines."""
    return used.stolen_s / (used.clock_s * cpus) if used.clock_s > 0 else 0.0


def describe(facts: dict[str, Any]) -> list[str]:
    """Return in words which part of a call's time is due to cores that are not the ranks' own.

    Args:
        facts: of ``core_facts``, with ``slowdown`` and ``stolen``.
    """
    cpus, cores, ratio, stolen = (facts[key] for key in ("cpus", "cores", "slowdown", "stolen"))
    said = f"the ranks' {cpus} CPUs are {cores} core{'' if cores == 1 else 's'}"
    if facts["shared"]:
        said += ": ranks are hyperthreads of one core, take cycles from each other, and look less before they sleep"
    elif ratio > _ALONE:
        said += " by the kernel, yet one rank slows down another: hyperthreads that it does not show, or a busy machine"
    lines = [
        f"{said}; work that needs nothing but a core takes {ratio:.2f} times as long on all ranks at once as on one"
    ]
    if ratio > _ALONE:
        lines.append(f"so about {1 - 1 / ratio:.0%} of what a call computes is due to that, and not to horovod")
    if stolen > _STOLEN:
        lines.append(f"{stolen:.1%} of the CPUs' time was stolen by other virtual machines: so much of each call, too")
    return lines
