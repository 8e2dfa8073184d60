"""GPUs of ranks: by default, every JAX rank computes on its host's first GPU, and allocates memory on all GPUs."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax

from horovod import context
from horovod.config import gpu_variables
from horovod.logs import logger

__all__ = ["is_left_to_chance", "warn_once"]


def is_left_to_chance(local_rank: int, platform: str, visible: str, environment: Mapping[str, str]) -> bool:
    """Return whether this is the second rank of a host and no setting selects or shares its GPU.

    Args:
        local_rank: local rank of this process; only the second one warns.
        platform: platform on which JAX computes.
        visible: JAX's setting of its visible GPUs.
        environment: the environment variables about GPUs.
    """
    return (
        local_rank == 1
        and platform in ("gpu", "cuda")
        and visible in ("", "all")
        and "CUDA_VISIBLE_DEVICES" not in environment
        and environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
    )


@functools.cache
def warn_once() -> None:
    """Warn if ranks would compete for the first GPU of their host."""
    visible = str(getattr(jax.config, "read", lambda name: "all")("jax_cuda_visible_devices"))
    if is_left_to_chance(context.world().local_rank, jax.default_backend(), visible, gpu_variables()):
        logger.warning(
            "the ranks of this host compute on the same GPU, and each takes three quarters of the memory of every GPU "
            "that it sees: call jax.config.update('jax_cuda_visible_devices', str(hvd.local_rank())) after hvd.init(), "
            "before JAX is used; ranks that share one on purpose need XLA_PYTHON_CLIENT_PREALLOCATE=false"
        )
