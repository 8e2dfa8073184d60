"""The one ``Collectives`` of TensorFlow in this process; every module of ``horovod.tensorflow`` goes through it."""

from __future__ import annotations

from horovod.bindings.collectives import Collectives
from horovod.tensorflow.adapter import TensorFlowAdapter

__all__ = ["comm"]

comm = Collectives(TensorFlowAdapter())
