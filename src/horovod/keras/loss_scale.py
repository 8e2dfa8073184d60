"""Loss scaling around distributed optimizers: either all ranks skip a step, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from horovod._keras.backends import Order
from horovod._keras.members import DistributedMembers
from horovod.core.requests import ReduceOp

__all__ = ["innermost", "teach_loss_scaling"]


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a loss scaling optimizer, or ``optimizer`` itself."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def teach_loss_scaling() -> None:
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
        name, none = f"{reduction.name}.finite", reduction.backend.compression.none
        order = Order(ReduceOp.MIN, process_set=reduction.settings.process_set, name=name, compression=none)
        return keras.ops.cast(reduction.backend.allreduce(keras.ops.cast(finite, "int32"), order), "bool")

    check_finite._asks_all_ranks = True  # type: ignore[attr-defined]
    scaling.check_finite = check_finite
