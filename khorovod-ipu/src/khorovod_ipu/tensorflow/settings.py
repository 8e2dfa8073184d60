"""The functions of ``ipu.utils`` and ``ipu.scopes`` that scripts call before they train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.options import IPUConfig, OptionTree

__all__ = [
    "SETTERS", "UTILITIES", "check_accepted", "configure_ipu_system", "create_ipu_config", "ipu_shard", "missing",
    "move_variable_initialization_to_cpu", "outside_compilation_scope", "reset_ipu_seed",
]  # fmt: skip

#: Functions of ``ipu.utils`` besides those of ``SETTERS``.
UTILITIES = ("configure_ipu_system", "create_ipu_config", "move_variable_initialization_to_cpu", "reset_ipu_seed")


def _noted(*path: str, order: tuple[str, ...] = ()) -> Callable[..., IPUConfig]:
    """Return a function that stores its arguments in a configuration, under a path; ``order`` names positional ones."""

    def note(opts: IPUConfig, *values: Any, **options: Any) -> IPUConfig:
        target: Any = opts
        for name in path:
            target = getattr(target, name)
        names = [*order, *map(str, range(len(order), len(values)))]
        for name, value in [*zip(names, values, strict=False), *options.items()]:
            setattr(target, name, value)
        return opts

    return note


def check_accepted(function: str, given: Mapping[str, Any], inert: str, **neutral: tuple[Any, ...]) -> None:
    """Raise if an argument does not exist or would change a result.

    Args:
        function: name of the function in messages.
        given: arguments by name.
        inert: names of arguments that change no result.
        neutral: values of other arguments that change no result.
    """
    for name, value in given.items():
        if name not in neutral and name not in inert.split():
            raise TypeError(f"{function} has no argument {name!r}")
        if name in neutral and value not in neutral[name]:
            raise NotImplementedError(f"{function}: {name}={value!r} is not imitated; see docs/strategies.md")


def create_ipu_config(**options: Any) -> IPUConfig:
    """Return a configuration that holds options of the SDK, without effect."""
    made = IPUConfig()
    made.compilation_options = OptionTree()
    return _noted("compilation_options")(made, **options)


def configure_ipu_system(config: IPUConfig, device: str = "cpu", **accepted: Any) -> None:
    """Do nothing: the device has nothing to configure."""
    config.configure_ipu_system(device)


def reset_ipu_seed(seed: int, **accepted: Any) -> None:
    """Seed the random numbers of TensorFlow, differently in each replica."""
    check_accepted("reset_ipu_seed()", accepted, "cpu_device device", experimental_identical_replicas=(False,))
    tf.compat.v1.set_random_seed(seed)


def move_variable_initialization_to_cpu(**accepted: Any) -> None:
    """Do nothing: variables are initialised on the host."""


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name of the SDK that is not imitated."""
    return AttributeError(
        f"{module} has no {name!r} on the software device, which imitates data-parallel training only; "
        "see docs/strategies.md"
    )


def ipu_shard(index: Any) -> Any:
    """Return a scope without effect: the software device is never divided."""
    return contextlib.nullcontext(index)


def outside_compilation_scope(name: str = "outside") -> Any:
    """Return a scope whose operations run on the host."""
    return tf.device("/device:CPU:0")


#: ``set_matmul_options(opts, ...)`` and the like: kept, without effect.
SETTERS = {
    f"set_{group}": _noted("compilation_options", group)
    for group in (
        "compilation_options", "convolution_options", "matmul_options", "pooling_options", "norm_options",
        "optimization_options", "recomputation_options", "floating_point_behaviour_options", "report_options",
        "gcl_options", "io_tile_options", "ipu_connection_type", "serialization_options", "transfer_options",
        "verification_options",
    )
}  # fmt: skip
SETTERS |= {name: _noted(order=(name,)) for name in ("auto_select_ipus", "select_ipus")}
SETTERS["set_ipu_model_options"] = _noted("ipu_model", order=("compile_ipu_code",))
SETTERS["set_experimental_multi_replica_distribution_options"] = _noted(
    "experimental", "multi_replica_distribution", order=("process_count", "process_index")
)
globals().update(SETTERS)
