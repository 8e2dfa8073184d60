"""How the device was configured before IPUConfig."""

from __future__ import annotations

from typing import Any

from khorovod_ipu.tensorflow.settings import (
    SETTERS,
    auto_select_ipus,
    configure_ipu_system,
    create_ipu_config,
    missing,
    move_variable_initialization_to_cpu,
    reset_ipu_seed,
    select_ipus,
    set_experimental_multi_replica_distribution_options,
    set_ipu_model_options,
)

__all__ = [
    "auto_select_ipus",
    "configure_ipu_system",
    "create_ipu_config",
    "move_variable_initialization_to_cpu",
    "reset_ipu_seed",
    "select_ipus",
    "set_experimental_multi_replica_distribution_options",
    "set_ipu_model_options",
]


def __getattr__(name: str) -> Any:
    if name not in SETTERS:
        raise missing(__name__, name)
    return SETTERS[name]
