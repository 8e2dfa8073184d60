"""What both kinds of Keras do to load a model with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["load_distributed"]


def load_distributed(
    load: Callable[..., Any],
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None,
    custom_objects: Mapping[str, Any] | None,
    distribute: Callable[[Any], Any],
) -> Any:
    """Load a model, and make the optimizer that it was saved with a distributed one.

    Args:
        load: Keras' own function.
        filepath: for it.
        custom_optimizers: classes of optimizers that are not Keras' own.
        custom_objects: names and classes, or functions, that are not Keras' own.
        distribute: makes an optimizer a distributed one.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = load(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        distribute(model.optimizer)
    return model
