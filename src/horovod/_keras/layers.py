"""Layers that each rank has for itself."""

from __future__ import annotations

from typing import Any

from horovod.bindings.misuse import wrong_argument

__all__ = ["local_variables"]


def local_variables(layers: Any, kind: type[Any]) -> list[Any]:
    """Return the trainable variables of a layer, or of several.

    Args:
        layers: a layer, a list of layers, or ``None``.
        kind: the class of layers.

    Raises:
        RequestError: they are no layers, or not built.
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
