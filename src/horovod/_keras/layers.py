"""Local layers, whose gradients are not combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.bindings.misuse import wrong_argument

__all__ = ["make_partial"]


def _local_variables(layers: Any, kind: type[Any]) -> list[Any]:
    """Return the trainable variables of one or several layers.

    Args:
        layers: a layer, a list of layers, or ``None``.
        kind: the class of layers.

    Raises:
        RequestError: an element is no layer, or a layer is not built.
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
    """Return ``PartialDistributedOptimizer`` for one kind of Keras.

    Args:
        distribute: its ``DistributedOptimizer``.
        innermost: returns the optimizer inside a loss scaling optimizer.
        kind: its class of layers.
    """

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
