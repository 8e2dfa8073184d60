"""``DistributedOptimizer`` of ``horovod.tensorflow.keras``: Horovod's order of arguments, for either Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod import context
from horovod._keras.layers import make_partial
from horovod._keras.settings import make_settings
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras.kind import LEGACY

if LEGACY:
    from horovod.tensorflow.keras.legacy import distribute, innermost
else:
    from horovod.keras.loss_scale import innermost
    from horovod.keras.optimizer import distribute

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


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
    """Make an optimizer of ``tf.keras`` work with the gradients of all ranks.

    Gradients are combined before they are clipped, inside the traced step.

    Args:
        optimizer: a Keras optimizer, or its name. It becomes the distributed one, with its state.
        name: accepted; operations are named by the order in which optimizers are first used.
        device_dense: accepted.
        device_sparse: accepted.
        compression: how gradients are sent, such as ``Compression.fp16``.
        sparse_as_dense: send sparse gradients as dense ones.
        gradient_predivide_factor: divides by this before the sum, and by the rest of the average after it.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients are accumulated before they are combined and applied.
        average_aggregated_gradients: average over these passes, instead of the sum.
        num_groups: deprecated; ``groups`` instead.
        groups: lists of variables whose gradients travel together, or a number of groups; by default all do.
        process_set: ranks that take part; on other ranks the optimizer works alone.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.

    Returns:
        ``optimizer``, whose class now derives from the one it had, with ``register_local_var(var)``. Saved models name
        the plain class.

    Raises:
        RequestError: an argument does not fit.
        NotInitializedError: ``init()`` was not called.
    """
    del name, device_dense, device_sparse
    context.world()
    return distribute(
        optimizer,
        make_settings(
            op=op,
            compression=compression,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            scale_local_gradients=scale_local_gradients,
        ),
    )


PartialDistributedOptimizer = make_partial(DistributedOptimizer, innermost, tf.keras.layers.Layer)
