"""How the device was configured before IPUConfig."""

from __future__ import annotations

from khorovod_ipu.tensorflow.settings import (
    auto_select_ipus,
    configure_ipu_system,
    create_ipu_config,
    move_variable_initialization_to_cpu,
    reset_ipu_seed,
    select_ipus,
    set_ipu_model_options,
)

__all__ = [
    "auto_select_ipus",
    "configure_ipu_system",
    "create_ipu_config",
    "move_variable_initialization_to_cpu",
    "reset_ipu_seed",
    "select_ipus",
    "set_ipu_model_options",
]
