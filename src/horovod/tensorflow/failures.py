"""Our errors as subclasses of TensorFlow's error classes, too."""

from __future__ import annotations

from contextlib import AbstractContextManager

import tensorflow as tf

from horovod import errors
from horovod.bindings.failures import typed

__all__ = ["code_of", "translated", "typed_errors"]

#: Our errors, TensorFlow's class and its code, as in Horovod; the first match is used.
_CLASSES: tuple[tuple[tuple[type[BaseException], ...], type[tf.errors.OpError], int], ...] = (
    ((errors.MismatchError, errors.NotInitializedError), tf.errors.FailedPreconditionError, 9),
    ((ValueError, TypeError), tf.errors.InvalidArgumentError, 3),
    ((NotImplementedError,), tf.errors.UnimplementedError, 12),
    ((errors.PeerLostError, errors.StallError, errors.HorovodInternalError), tf.errors.UnknownError, 2),
    ((MemoryError,), tf.errors.ResourceExhaustedError, 8),
)
_OTHERS = (tf.errors.UnknownError, 2)


def _mapped(kind: type[BaseException]) -> tuple[type[tf.errors.OpError], int]:
    for ours, theirs, code in _CLASSES:
        if issubclass(kind, ours):
            return theirs, code
    return _OTHERS


def code_of(error: BaseException) -> int:
    """Return TensorFlow's number for the class of an error."""
    return _mapped(type(error))[1]


#: For each class of our errors, a class that derives from it and from one of TensorFlow's.
_both_of: dict[type[Exception], type[Exception]] = {}


def _both(kind: type[Exception]) -> type[Exception]:
    if kind not in _both_of:
        namespace = {"__module__": kind.__module__, "__init__": _init, "__reduce__": _reduce}
        _both_of[kind] = type(kind.__name__, (kind, _mapped(kind)[0]), namespace)
    return _both_of[kind]


def _init(self: Exception, node_def: object, op: object, message: str, *args: object) -> None:
    # Take the arguments of TensorFlow's classes: AutoGraph re-creates errors to add the user's code to the text.
    tf.errors.OpError.__init__(self, node_def, op, message, code_of(self), *args)
    self.args = (message,)  # shown by repr(); TensorFlow's classes set none


def _reduce(error: Exception) -> tuple[object, ...]:
    ours, state = type(error).__bases__[0], dict(error.__dict__)
    return _revive, (ours, str(error), {k: v for k, v in state.items() if not k.startswith("_")})


def _revive(kind: type[Exception], text: str, state: dict[str, object]) -> Exception:
    error = kind(text)
    error.__dict__.update(state)
    return translated(error)


def translated(error: Exception) -> Exception:
    """Return our error as a class that TensorFlow scripts catch, too; return other errors unchanged."""
    kind = type(error)
    if isinstance(error, tf.errors.OpError) or not isinstance(error, errors.HorovodInternalError | ValueError):
        return error
    found: Exception = _both(kind)(None, None, str(error))
    found.__dict__.update(error.__dict__)
    return found.with_traceback(error.__traceback__)


def typed_errors() -> AbstractContextManager[None]:
    """Return a context that raises our original error instead of TensorFlow's error with its text."""
    return typed((tf.errors.OpError,))
