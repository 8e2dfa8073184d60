"""The public names for elastic training with each Keras, derived from one source."""

from __future__ import annotations

from typing import Any

from horovod._keras.backends import Backend
from horovod._keras.callbacks import Kit
from horovod._keras.elastic_callbacks import CommitState, UpdateBatchState, UpdateEpochState
from horovod._keras.model_state import ModelState

__all__ = ["derive_callbacks", "derive_state"]


def derive_state(name: str, kit: Kit, backend: Backend, module: str) -> Any:
    """Return the public state class of one kind of Keras.

    Args:
        name: name of the class.
        kit: functions of this Keras.
        backend: backend of this Keras.
        module: name of the module that defines the class.
    """
    doc = ModelState.__doc__
    return type(name, (ModelState,), {"__module__": module, "__doc__": doc, "_kit": kit, "_backend": backend})


def derive_callbacks(callbacks: Any, module: str) -> tuple[Any, ...]:
    """Return the three public callback classes for one kind of Keras.

    Args:
        callbacks: its module of callbacks.
        module: name of the module that defines the classes.
    """
    kinds = (
        ("CommitStateCallback", CommitState),
        ("UpdateBatchStateCallback", UpdateBatchState),
        ("UpdateEpochStateCallback", UpdateEpochState),
    )
    return tuple(
        type(name, (ours, callbacks.Callback), {"__module__": module, "__doc__": ours.__doc__}) for name, ours in kinds
    )
