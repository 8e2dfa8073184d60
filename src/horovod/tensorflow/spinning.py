"""Threads of TensorFlow's that have nothing to do, where a rank has one core.

They look for work for a while before they sleep, and so keep the core from who has some: from the thread that exchanges
a small tensor with another rank, and from that rank. A function that does so took half as long again. There is no
variable in the environment for it, as there is for how many threads there are; only the options of the context.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context

__all__ = ["calm", "let_idle_threads_sleep"]


def calm(context: Any, environ: Mapping[str, str]) -> bool:
    """Have idle threads sleep at once, if this process was given one core; return whether they will.

    Args:
        context: TensorFlow's; left alone once it has threads, and where somebody has chosen options.
        environ: says how many threads an operation may use.
    """
    if environ.get("TF_NUM_INTRAOP_THREADS") != "1":
        return False
    # Private names: where they are others, threads look as ever.
    if getattr(context, "_context_handle", 0) is not None or getattr(context, "_config", 0) is not None:
        return False
    experimental = config_pb2.ConfigProto.Experimental(disable_thread_spinning=True)
    context._config = config_pb2.ConfigProto(experimental=experimental)
    return True


def let_idle_threads_sleep() -> None:
    """See ``calm``; before TensorFlow's first operation.

    Where there is no context yet, none is made: a script of TensorFlow 1 may ask for one with options of its own, by
    ``enable_eager_execution(config=...)``, which fails where there is one. So the one that TensorFlow makes by itself
    is calmed when it does.
    """
    if (present := eager_context.context_safe()) is not None:
        calm(present, os.environ)
        return
    create = getattr(eager_context, "_create_context", None)
    if create is None:
        return

    def create_calm() -> None:
        create()
        calm(eager_context.context_safe(), os.environ)

    setattr(eager_context, "_create_context", create_calm)  # noqa: B010  a private name, which mypy does not know
