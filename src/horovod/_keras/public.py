"""The public names of each Keras, derived from one source; and the choice of its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horovod._keras.backends import Backend
from horovod._keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    Kit,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from horovod._keras.elastic_callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from horovod._keras.elastic_fit import FitKit
from horovod._keras.model_state import ModelState
from horovod.bindings.misuse import wrong_argument

__all__ = ["derive_callbacks", "derive_elastic", "make_load_model", "make_partial", "of_name"]


def of_name(name: str) -> Backend:
    """Return the named backend, and load only the binding that it needs.

    Raises:
        ImportError: there is no binding for this backend.
    """
    if name == "torch":
        from horovod._keras.on_torch import backend
    elif name == "tensorflow":
        from horovod._keras.on_tensorflow import backend
    elif name == "jax":
        from horovod._keras.on_jax import backend
    else:
        raise ImportError(
            f"horovod.keras works on Keras' backends tensorflow, torch and jax; KERAS_BACKEND is {name}", name=__name__
        )
    return backend


def _derive(name: str, bases: tuple[Any, ...], module: str, **attributes: Any) -> Any:
    """Return a public class with the docstring of its first base."""
    return type(name, bases, {"__module__": module, "__doc__": bases[0].__doc__, **attributes})


def derive_callbacks(kit: Kit, callbacks: Any, module: str) -> tuple[Any, ...]:
    """Return the five public callback classes of a module, for one kind of Keras."""
    plain = (
        BroadcastGlobalVariablesCallback, MetricAverageCallback, LearningRateScheduleCallback,
        LearningRateWarmupCallback,
    )  # fmt: skip
    kinds = (*((ours, callbacks.Callback) for ours in plain), (BestModelCheckpoint, callbacks.ModelCheckpoint))
    return tuple(_derive(bases[0].__name__, bases, module, _kit=kit) for bases in kinds)


def derive_elastic(kit: Kit, fit_kit: FitKit, callbacks: Any, module: str) -> tuple[Any, ...]:
    """Return the public class of states of a module, and its three callback classes for elastic training."""
    state = _derive("KerasState", (ModelState,), module, _kit=kit, _fit_kit=fit_kit)
    kinds = CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
    return state, *(_derive(ours.__name__, (ours, callbacks.Callback), module) for ours in kinds)


def _local_variables(layers: Any, kind: type[Any]) -> list[Any]:
    """Return the trainable variables of one or several layers of a kind.

    Raises:
        RequestError: an element is not a layer, or a layer is not built.
    """
    layers = [] if layers is None else list(layers) if isinstance(layers, list | tuple) else [layers]
    for layer in layers:
        if not isinstance(layer, kind):
            raise wrong_argument(f"local_layers must be a layer or a list of layers. Received: {layer!r}")
        if not layer.built:
            raise wrong_argument(
                f"the local layer {layer.name} has no variables yet; build the model first, with model.build(shape)"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]


def make_partial(
    distribute: Callable[..., Any], innermost: Callable[[Any], Any], kind: type[Any]
) -> Callable[..., Any]:
    """Return ``PartialDistributedOptimizer`` for one kind of Keras, which has this kind of layers."""

    def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
        optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
    ) -> Any:
        """Make an optimizer use the combined gradients of all ranks, except for local layers.

        Args:
            optimizer: as in ``DistributedOptimizer``.
            *args: as in ``DistributedOptimizer``.
            local_layers: a built layer, or a list of built layers. Register them with BroadcastGlobalVariablesCallback,
                too.
            **kwargs: as in ``DistributedOptimizer``; ``scale_local_gradients`` divides the gradients of local layers by
                the number of ranks, as an average over ranks would.

        Returns:
            As ``DistributedOptimizer``.

        Raises:
            RequestError: an argument is invalid.
            NotInitializedError: ``init()`` was not called.
        """
        variables = _local_variables(local_layers, kind)
        optimizer = distribute(optimizer, *args, **kwargs)
        for variable in variables:
            innermost(optimizer).register_local_var(variable)
        return optimizer

    # The public name, which the documentation shows.
    PartialDistributedOptimizer.__module__ = distribute.__module__
    PartialDistributedOptimizer.__qualname__ = "PartialDistributedOptimizer"
    return PartialDistributedOptimizer


def make_load_model(load: Callable[..., Any], distribute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``load_model`` for one kind of Keras."""

    def load_model(
        filepath: Any,
        custom_optimizers: Iterable[type[Any]] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        compression: Any = None,
        legacy_opts: bool = False,
    ) -> Any:
        """Load a model with a distributed optimizer that continues from the saved optimizer's state.

        The saved optimizer may be distributed or not: files always name the plain class.

        Args:
            filepath: as for Keras' own ``load_model``.
            custom_optimizers: classes of optimizers that are not Keras' own.
            custom_objects: names and classes, or functions, that are not Keras' own.
            compression: compressor of the gradients, such as ``Compression.fp16``.
            legacy_opts: accepted and ignored.

        Returns:
            The compiled model; without an optimizer if it was saved without one.

        Raises:
            NotInitializedError: ``init()`` was not called.
        """
        known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
        model = load(filepath, custom_objects=known)
        if getattr(model, "optimizer", None) is not None:
            distribute(model.optimizer, **({} if compression is None else {"compression": compression}))
        return model

    # The public name, which the documentation shows.
    load_model.__module__, load_model.__qualname__ = distribute.__module__.rpartition(".")[0], "load_model"
    return load_model
