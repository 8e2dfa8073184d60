"""The only ``Collectives`` of TensorFlow in this process; every module of ``horovod.tensorflow`` uses it."""

from horovod.bindings.collectives import Collectives
from horovod.tensorflow.adapter import TensorFlowAdapter
from horovod.tensorflow.unsafe import let_idle_threads_sleep

__all__ = ["comm"]

let_idle_threads_sleep()
comm = Collectives(TensorFlowAdapter())
