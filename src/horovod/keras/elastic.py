"""Elastic training with Keras 3: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from horovod._keras.elastic_fit import FitKit, fit
from horovod._keras.public import derive_elastic
from horovod.bindings.elastic import common_names
from horovod.bindings.elastic.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.step import decorators
from horovod.bindings.misuse import wrong_argument
from horovod.keras.callbacks import KIT

__all__ = [
    "FIT_KIT",
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "fit",
    "run",
    "shard",
    "step",
]
__all__ += common_names.__all__

_backend = KIT.backend
if _backend.name == "tensorflow":
    from horovod.tensorflow.shards import shard
else:
    from horovod.bindings.elastic.shard import shard
_ON_JAX = _backend.name == "jax"


def _convert(batch: Any) -> Any:
    def tensor(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
            value = value.astype(keras.config.floatx(), copy=False)
        return keras.ops.convert_to_tensor(value)

    return keras.tree.map_structure(tensor, batch)


def _make_function(model: Any) -> Callable[[list[Any]], Any]:
    if model.steps_per_execution > 1 and tuple(map(int, keras.__version__.split(".")[:2])) < (3, 7):
        raise wrong_argument(
            f"hvd.elastic.fit() takes steps_per_execution > 1 with Keras 3.7 or later: Keras {keras.__version__} drops "
            "batches at the end of an epoch that fill no execution"
        )
    model.make_train_function()
    plain = model.train_function
    if _backend.name == "torch":
        return lambda batches: plain(batches)
    if not _ON_JAX:
        return lambda batches: plain(iter(batches))

    def on_jax(batches: list[Any]) -> Any:
        variables = _variables(model)
        result = plain(_values(variables), iter(batches))
        _backend.wait(result)
        _write(variables, result[1])
        return result

    return on_jax


def _variables(model: Any) -> Any:
    """Return a model's variables, in lists in which Keras on JAX hands their values to a train function."""
    optimizer = model.optimizer.variables
    return model.trainable_variables, model.non_trainable_variables, optimizer, model.metrics_variables


def _values(variables: Any) -> Any:
    return tuple([variable._value for variable in some] for some in variables)


def _write(variables: Any, values: Any) -> None:
    for some, arrays in zip(variables, values, strict=True):
        for variable, array in zip(some, arrays, strict=True):
            variable._value = array


def _present(model: Any, sample: Any) -> Any:
    if model._compile_metrics is not None and not model._compile_metrics.built:
        # This process has done no step, and has only the end of an epoch to do; Keras builds metrics in the first one.
        model.test_on_batch(*keras.utils.unpack_x_y_sample_weight(sample))
        model.reset_metrics()
    logs = model.get_metrics_result()
    return (logs, _values(_variables(model))) if _ON_JAX else logs


@contextmanager
def _installed(model: Any, call: Callable[[], Any]) -> Iterator[None]:
    def on_jax(values: Any, iterator: Any) -> Any:
        """Keep the values in the model's variables while a step runs, so that states can read and change them."""
        _write(_variables(model), values)
        model._jax_state_synced = True
        try:
            result = call()
        except BaseException:
            # Otherwise Keras would restore the values from before the failed step.
            model._jax_state = None
            raise
        model._jax_state_synced = False
        return result

    plain = model.train_function
    model.train_function = on_jax if _ON_JAX else lambda iterator: call()
    try:
        yield
    finally:
        model.train_function = plain


FIT_KIT = FitKit(keras.callbacks.CallbackList, _convert, _make_function, _present, _installed, shard)

KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = derive_elastic(
    KIT, FIT_KIT, keras.callbacks, __name__
)
run, step = decorators(_backend.typed, _backend.wait)
