"""``popdist.tensorflow.set_ipu_config`` on the configuration of this distribution, and a strategy that follows."""

from __future__ import annotations

import os
from typing import Any

import pytest
from harness import run_ranks

pytestmark = pytest.mark.slow


def configured() -> list[Any]:
    rank, size = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]
    own = {"NUM_TOTAL_REPLICAS": size, "REPLICA_INDEX_OFFSET": rank, "LOCAL_INSTANCE_INDEX": rank}
    names = {f"POPDIST_{name}": value for name, value in own.items()}
    os.environ.update(names)
    try:
        import tensorflow as tf
        from tensorflow.python import ipu

        import popdist
        import popdist.tensorflow

        config = popdist.tensorflow.set_ipu_config(ipu.config.IPUConfig(), ipus_per_replica=1)
        norms = config.norms.experimental
        norms.distributed_batch_norm_replica_group_size = 2
        with pytest.raises(NotImplementedError, match="distributed_batch_norm_replica_group_size"):
            config.configure_ipu_system()
        norms.distributed_batch_norm_replica_group_size = 1
        config.configure_ipu_system()
        place = config.experimental.multi_replica_distribution
        from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

        strategy = PopDistStrategy()
        with strategy.scope():
            weight = tf.Variable(float(popdist.getInstanceIndex() + 7))
        squares = strategy.run(lambda x: x * x, args=(tf.constant(float(popdist.getInstanceIndex() + 1)),))
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, squares, axis=None)
        found = [config.select_ipus, place.process_count, place.process_index, weight.numpy(), float(total)]
        popdist.finalizeBackend()
        return found
    finally:
        for name in names:
            del os.environ[name]


def test_instances_of_poprun_configure_tensorflow_and_reduce_among_each_other() -> None:
    assert run_ranks(2, configured, init=False, framework="tensorflow") == [
        [0, 2, 0, 7.0, 5.0],
        [1, 2, 1, 7.0, 5.0],
    ]
