"""``DistributedOptimizer``: a Keras optimizer that uses the combined gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from horovod import context
from horovod._keras.members import DistributedMembers, make_distributed
from horovod._keras.public import make_partial, of_name
from horovod._keras.reduction import GradientReduction
from horovod._keras.settings import NAME, OPTIMIZER, Settings, make_settings
from horovod.bindings.docstrings import explained_like
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "distribute", "innermost"]


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a loss scaling optimizer, or ``optimizer`` itself."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def distribute(optimizer: Any, settings: Settings) -> Any:
    """Make an optimizer of Keras 3 distributed, in place, and return it.

    Args:
        optimizer: an optimizer, or an argument for ``keras.optimizers.get``. It keeps its variables.
        settings: settings of the reduction.

    Raises:
        RequestError: ``optimizer`` is not an optimizer, or already accumulates another number of passes.
    """
    if isinstance(optimizer, str | dict):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise wrong_argument(
            f"the optimizer is one of tf_keras: {kind}. Set TF_USE_LEGACY_KERAS=1 and import horovod.tensorflow.keras "
            "as hvd, or take the optimizer from keras.optimizers"
            if kind.startswith("tf_keras.")
            else f"optimizer must be one of Keras, such as keras.optimizers.SGD(0.1). Received: {type_name(optimizer)}"
        )
    _teach_loss_scaling()
    inner = innermost(optimizer)
    _accumulate(inner, settings.passes)
    backend = of_name(keras.backend.backend())
    make_distributed(inner, DistributedMembers, GradientReduction(settings, backend, inner._var_key))
    backend.shield(inner)
    return optimizer


def _teach_loss_scaling() -> None:
    """Patch Keras' LossScaleOptimizer, once, to check on all ranks that gradients are finite.

    It decides whether to call its inner optimizer; a distributed one would wait for ranks that skip the call.
    ``compile()`` may make one by itself, so we patch the class. Around plain optimizers nothing changes.
    """
    scaling = keras.optimizers.LossScaleOptimizer
    if getattr(scaling.check_finite, "_asks_all_ranks", False):
        return
    alone = scaling.check_finite

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        """Return whether the gradients of all ranks are finite."""
        finite = alone(self, grads)
        inner = innermost(self)
        if not isinstance(inner, DistributedMembers) or not inner._reduction.settings.active:
            return finite
        reduction = inner._reduction
        name, process_set = f"{reduction.name}.finite", reduction.settings.process_set
        number = keras.ops.cast(finite, "int32")
        least = reduction.backend.hvd.allreduce(number, name=name, op=ReduceOp.MIN, process_set=process_set)
        return keras.ops.cast(least, "bool")

    check_finite._asks_all_ranks = True  # type: ignore[attr-defined]
    scaling.check_finite = check_finite


def _accumulate(optimizer: Any, passes: int) -> None:
    """Make Keras accumulate gradients over ``passes`` passes; every backend supports this."""
    own = optimizer.gradient_accumulation_steps
    if passes == 1 or own == passes:
        return
    if own:
        raise wrong_argument(
            f"the optimizer has gradient_accumulation_steps={own}, and gradients are combined once in {own} passes; "
            f"leave out backward_passes_per_step. Received: backward_passes_per_step={passes}"
        )
    if optimizer.built:
        raise wrong_argument(
            "backward_passes_per_step needs an optimizer that was not used yet: its memory for gradients is made with "
            "its other variables"
        )
    optimizer.gradient_accumulation_steps = passes


@explained_like(make_settings, optimizer=OPTIMIZER, name=NAME)
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer use the combined gradients of all ranks.

    It works in ``fit()`` and in custom loops, through ``apply``, ``apply_gradients`` and ``stateless_apply``.
    Gradients are combined before they are clipped, inside the compiled step if there is one.

    Returns:
        ``optimizer``; its class now derives from its original class. Saved models name the original class.

    Raises:
        RequestError: an argument is invalid.
        NotInitializedError: ``init()`` was not called.
    """
    given = dict(locals())  # all arguments are settings, but for these
    del given["optimizer"], given["name"], given["device_dense"], given["device_sparse"]
    given["compression"] = compression or of_name(keras.backend.backend()).compression.none
    context.world()
    return distribute(optimizer, make_settings(**given))


PartialDistributedOptimizer = make_partial(DistributedOptimizer, innermost, keras.layers.Layer)
