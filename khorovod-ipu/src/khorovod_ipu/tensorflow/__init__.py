"""The SDK's TensorFlow for data-parallel training, over a TensorFlow of today.

``import khorovod_ipu.tensorflow`` makes ``tensorflow.python.ipu`` importable; installed, ``khorovod_ipu.pth`` does it
when Python starts. Nothing is loaded by that.

    cluster, peers        TF_CONFIG; watches the other workers
    collectives           the interface of strategies: engine (horovod.tensorflow), ring (TensorFlow's own, over gRPC)
    cross_device          TensorFlow's interface for reductions, over collectives
    strategy, strategies  one strategy; its names in the SDK
    sessions, servers     sessions and servers of TensorFlow 1
    software              parts that TensorFlow no longer has
    estimator             IPUEstimator
    programs, queues      compile, loops, queues and pipelines
"""

from __future__ import annotations

import khorovod_ipu_finder
from khorovod_ipu.guard import refuse_beside_the_sdk

__all__: list[str] = []

refuse_beside_the_sdk()
khorovod_ipu_finder.install()
