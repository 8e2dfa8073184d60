"""The functions of ``ipu.utils`` and ``ipu.scopes`` that scripts call before they train."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.options import IPUConfig, Options

__all__ = [
    "auto_select_ipus",
    "configure_ipu_system",
    "create_ipu_config",
    "ipu_shard",
    "move_variable_initialization_to_cpu",
    "outside_compilation_scope",
    "reset_ipu_seed",
    "select_ipus",
    "set_ipu_model_options",
]


def create_ipu_config(**options: Any) -> IPUConfig:
    """Return a configuration.

    Args:
        options: of the SDK; kept, without effect.
    """
    made = IPUConfig()
    made.compilation_options = Options()
    for name, value in options.items():
        setattr(made.compilation_options, name, value)
    return made


def auto_select_ipus(opts: IPUConfig, num_ipus: int) -> IPUConfig:
    """Say how many devices a program wants.

    Args:
        opts: is changed.
        num_ipus: how many.
    """
    opts.auto_select_ipus = num_ipus
    return opts


def select_ipus(opts: IPUConfig, indices: Any) -> IPUConfig:
    """Say which devices a program wants.

    Args:
        opts: is changed.
        indices: which.
    """
    opts.select_ipus = indices
    return opts


def set_ipu_model_options(opts: IPUConfig, compile_ipu_code: bool = True, **options: Any) -> IPUConfig:
    """Say how a model of the device would be made.

    Args:
        opts: is changed.
        compile_ipu_code: kept.
        options: kept.
    """
    for name, value in {"compile_ipu_code": compile_ipu_code, **options}.items():
        setattr(opts.ipu_model, name, value)
    return opts


def configure_ipu_system(config: IPUConfig, device: str = "cpu", **accepted: Any) -> None:
    """Make a configuration the one in use.

    Args:
        config: which.
        device: accepted.
        accepted: other arguments of the SDK.
    """
    config.configure_ipu_system(device)


def reset_ipu_seed(seed: int, **accepted: Any) -> None:
    """Seed the random numbers of TensorFlow.

    Args:
        seed: a number.
        accepted: other arguments of the SDK.
    """
    tf.compat.v1.set_random_seed(seed)


def move_variable_initialization_to_cpu(**accepted: Any) -> None:
    """Do nothing: variables are initialised on the host.

    Args:
        accepted: arguments of the SDK.
    """


def ipu_shard(index: Any) -> Any:
    """Return a scope that does nothing: a software device is one.

    Args:
        index: of the device.
    """
    return contextlib.nullcontext(index)


def outside_compilation_scope(name: str = "outside") -> Any:
    """Return a scope whose operations are the host's.

    Args:
        name: accepted.
    """
    return tf.device("/device:CPU:0")
