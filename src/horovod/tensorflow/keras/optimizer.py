"""``DistributedOptimizer`` of ``horovod.tensorflow.keras``: Horovod's order of arguments, for either Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod import context
from horovod._keras.public import make_partial
from horovod._keras.settings import NAME, OPTIMIZER, make_settings
from horovod.bindings.docstrings import explained_like
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras.legacy import LEGACY

if LEGACY:
    from horovod.tensorflow.keras.legacy import distribute, innermost
else:
    from horovod.keras.optimizer import distribute, innermost

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


@explained_like(make_settings, optimizer=OPTIMIZER, name=NAME)
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of ``tf.keras`` use the combined gradients of all ranks.

    Gradients are combined before they are clipped, inside the traced step.

    Returns:
        ``optimizer``; its class now derives from its original class and has ``register_local_var(var)``. Saved models
        name the original class.

    Raises:
        RequestError: an argument is invalid.
        NotInitializedError: ``init()`` was not called.
    """
    given = dict(locals())  # all arguments are settings, but for these
    del given["optimizer"], given["name"], given["device_dense"], given["device_sparse"]
    context.world()
    return distribute(optimizer, make_settings(**given))


PartialDistributedOptimizer = make_partial(DistributedOptimizer, innermost, tf.keras.layers.Layer)
