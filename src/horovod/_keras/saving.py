"""``load_model`` for each Keras: load a model and make its optimizer distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["make_load_model"]


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
        del legacy_opts
        known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
        model = load(filepath, custom_objects=known)
        if getattr(model, "optimizer", None) is not None:
            distribute(model.optimizer, **({} if compression is None else {"compression": compression}))
        return model

    # The public name, which the documentation shows.
    load_model.__module__, load_model.__qualname__ = distribute.__module__.rpartition(".")[0], "load_model"
    return load_model
