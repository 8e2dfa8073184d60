"""Log lines about a job that starts: ``info`` for the job, ``debug`` for each rank."""

from __future__ import annotations

import logging
import os
import platform
import sys
from dataclasses import fields

from horovod._version import __version__
from horovod.config import Config, Setting, openmp_threads
from horovod.engine.link import Link
from horovod.logs import logger
from horovod.phrases import format_bytes

__all__ = ["started"]

_LIBRARIES = ("torch", "tensorflow", "keras", "jax", "numpy")


def started(config: Config, job: str, link: Link) -> None:
    """Log the ranks, their hosts and the settings: rank 0 for all, each rank for itself."""
    generation = link.generation
    if generation.size == 1:
        return
    if link.rank == 0:
        who = "; ".join(generation.describe(rank) for rank in range(generation.size))
        logger.info(
            f"job {job}: {generation.size} ranks over {link.transport.name}: {who}\n"
            f"khorovod {__version__}, Python {platform.python_version()}, {_libraries()}, {platform.platform()}\n"
            f"fusion up to {format_bytes(config.fusion_threshold_bytes)}, "
            f"gradient buckets of {format_bytes(config.bucket_bytes)}, "
            f"arenas of {format_bytes(config.arena_bytes) if config.arena_bytes else 'the default size'}; "
            f"stalls are reported after {config.stall_warn_s:g} s, deadlocks end the job after {config.deadlock_s:g} s"
        )
    if not logger.isEnabledFor(logging.DEBUG):
        return
    share = link.doorbell.share if link.doorbell is not None else 1
    logger.debug(
        f"{generation.describe(link.rank)}: {sys.executable} {' '.join(sys.argv)}\n"
        f"cores {sorted(os.sched_getaffinity(0))}, {share} for each rank, OMP_NUM_THREADS="
        f"{openmp_threads() or '(not set)'}{_torch_threads()}\n"
        f"settings that are not the defaults: {_changed(config)}"
    )


def _libraries() -> str:
    """Return the frameworks that are loaded; this loads none."""
    loaded = [(name, sys.modules.get(name)) for name in _LIBRARIES]
    return ", ".join(f"{name} {getattr(module, '__version__', '')}" for name, module in loaded if module is not None)


def _torch_threads() -> str:
    torch = sys.modules.get("torch")
    return f", torch uses {torch.get_num_threads()} threads" if torch is not None else ""


def _changed(config: Config) -> str:
    found = []
    for field in fields(config):
        setting: Setting = field.metadata["setting"]
        value = getattr(config, field.name)
        if value != setting.default:
            found.append(f"{setting.env}={value}")
    return " ".join(found) or "none"
