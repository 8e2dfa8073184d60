"""The functions of ``ipu.utils`` and ``ipu.scopes`` that scripts call before they train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.options import IPUConfig, Options

__all__ = [
    "SETTERS",
    "auto_select_ipus",
    "configure_ipu_system",
    "create_ipu_config",
    "ipu_shard",
    "missing",
    "move_variable_initialization_to_cpu",
    "outside_compilation_scope",
    "reset_ipu_seed",
    "select_ipus",
    "set_experimental_multi_replica_distribution_options",
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


def set_experimental_multi_replica_distribution_options(
    opts: IPUConfig, process_count: int, process_index: int
) -> IPUConfig:
    """Say which of several processes this is.

    Args:
        opts: is changed.
        process_count: how many there are.
        process_index: which this is.
    """
    place = opts.experimental.multi_replica_distribution
    place.process_count, place.process_index = process_count, process_index
    return opts


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name of the SDK that is not imitated.

    Args:
        module: where it was looked for.
        name: what was looked for.
    """
    return AttributeError(
        f"{module} has no {name!r} on the software device, which has what data-parallel training needs; "
        "docs/strategies.md says what it imitates"
    )


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


def _setter(group: str) -> Callable[..., IPUConfig]:
    def set_options(opts: IPUConfig, *values: Any, **options: Any) -> IPUConfig:
        made = getattr(opts.compilation_options, group)
        for name, value in [*((str(place), value) for place, value in enumerate(values)), *options.items()]:
            setattr(made, name, value)
        return opts

    set_options.__name__, set_options.__doc__ = f"set_{group}", f"Note {group} in a configuration; without effect."
    return set_options


#: ``set_matmul_options(opts, ...)`` and the like: kept, without effect.
SETTERS = {
    f"set_{group}": _setter(group)
    for group in (
        "compilation_options", "convolution_options", "matmul_options", "pooling_options", "norm_options",
        "optimization_options", "recomputation_options", "floating_point_behaviour_options", "report_options",
        "gcl_options", "io_tile_options", "ipu_connection_type", "serialization_options", "transfer_options",
        "verification_options",
    )
}  # fmt: skip
