"""Sessions of TensorFlow 1: run on the software device, and name lost workers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session as tf_session

__all__ = ["prepare"]

#: Seconds to wait until the watch notices a loss that gRPC has already reported.
_NOTICE_S = 10.0
_OF_A_LOSS = (
    tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError,
    tf.errors.UnknownError,
)  # fmt: skip


def prepare() -> None:
    """Place operations of ``/device:IPU:0`` on the host, and make sessions name lost workers."""
    tf.config.set_soft_device_placement(True)  # the same outside of sessions; it is off after some uses of graphs
    base = tf_session.BaseSession
    if hasattr(base, "_khorovod_plain"):
        return
    base._khorovod_plain = (base.__init__, base.run)
    plain_init, plain_run = base._khorovod_plain

    @functools.wraps(plain_init)
    def init(self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        # The device is software, so TensorFlow has no device of this name.
        config = copy.deepcopy(config) if config is not None else tf.compat.v1.ConfigProto()
        config.allow_soft_placement = True
        plain_init(self, target, graph, config)

    @functools.wraps(plain_run)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        workers = getattr(self.graph, "_khorovod_workers", None)
        if workers is None:
            return plain_run(self, *args, **kwargs)
        workers.wait_for_workers()
        try:
            with workers.ends_when_one_is_lost(self):
                return plain_run(self, *args, **kwargs)
        except tf.errors.DeadlineExceededError as error:
            raise tf.errors.DeadlineExceededError(None, None, f"{workers.out_of_step()}\n{error}") from error
        except (*_OF_A_LOSS, RuntimeError) as error:
            lost = workers.watch.lost(_NOTICE_S if isinstance(error, _OF_A_LOSS) else 0.0)
            if not lost:
                raise
            raise tf.errors.UnavailableError(None, None, f"{lost}\n{error}") from error

    base.__init__, base.run = init, run
