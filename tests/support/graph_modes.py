"""horovod.tensorflow as the conformance suite calls it: every call in a function, or in a graph with a Session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from heard import heard

__all__ = ["InGraphs", "callbacks_that_cannot_be_moved"]


class InGraphs:
    """See the module.

    Args:
        mode: ``function`` or ``session``.
    """

    def __init__(self, mode: str) -> None:
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._mode = mode
        self.rank, self.size, self.barrier = hvd.rank, hvd.size, hvd.barrier

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda tensors, *args, **how: self._call(getattr(self._hvd, name), tensors, args, how)

    def _call(self, collective: Any, tensors: Any, args: Any, how: Any) -> Any:
        import tensorflow as tf

        is_group = isinstance(tensors, list)
        given = tensors if is_group else [tensors]

        def inside(*tensors: Any) -> Any:
            return collective(list(tensors) if is_group else tensors[0], *args, **how)

        if self._mode == "function":
            return tf.function(inside, autograph=False)(*given)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            places = [tf.compat.v1.placeholder(tensor.dtype, tensor.shape) for tensor in given]
            return session.run(inside(*places), {place: t.numpy() for place, t in zip(places, given, strict=True)})


@contextmanager
def callbacks_that_cannot_be_moved() -> Iterator[list[str]]:
    """Let this TensorFlow be one whose callbacks lie in memory as no library has them; yields what is warned."""
    from horovod.tensorflow import unsafe

    before, unsafe.known_layout = unsafe.known_layout, unsafe.Layout(code_of="no library")
    try:
        with heard() as said:
            yield said
    finally:
        unsafe.known_layout = before
