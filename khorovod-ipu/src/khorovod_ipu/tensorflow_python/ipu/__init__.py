"""``tensorflow.python.ipu`` in software: names of the SDK over ``khorovod_ipu.tensorflow``."""

from __future__ import annotations

from typing import NoReturn

from khorovod_ipu.tensorflow import settings, software

software.prepare()

from tensorflow.python.ipu import (  # noqa: E402
    config,
    distributed,
    ipu_compiler,
    ipu_estimator,
    ipu_infeed_queue,
    ipu_multi_worker_strategy,
    ipu_outfeed_queue,
    ipu_run_config,
    ipu_strategy,
    keras,
    loops,
    ops,
    pipelining_ops,
    scopes,
    utils,
)

__all__ = [
    "config",
    "distributed",
    "ipu_compiler",
    "ipu_estimator",
    "ipu_infeed_queue",
    "ipu_multi_worker_strategy",
    "ipu_outfeed_queue",
    "ipu_run_config",
    "ipu_strategy",
    "keras",
    "loops",
    "ops",
    "pipelining_ops",
    "scopes",
    "utils",
]


def __getattr__(name: str) -> NoReturn:
    raise settings.missing(__name__, name)
