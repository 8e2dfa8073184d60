"""The strategies of the SDK: one class over different collectives."""

from __future__ import annotations

from typing import Any

from khorovod_ipu.tensorflow import cluster, keras_input, servers, sessions
from khorovod_ipu.tensorflow.collectives import Alone
from khorovod_ipu.tensorflow.ring import RingCollectives
from khorovod_ipu.tensorflow.strategy import HostReducedStrategy

__all__ = ["IPUHorovodStrategy", "IPUMultiWorkerStrategy", "IPUStrategy"]

_DEVICE = "/device:IPU:0"


class IPUMultiWorkerStrategy(HostReducedStrategy):
    """Workers from TF_CONFIG or a cluster resolver, combined by TensorFlow's own rings over gRPC.

    With eager execution it must be created before any other use of TensorFlow; it starts this worker's server and waits
    for the others. In graphs of TensorFlow 1 a script starts ``tf.distribute.Server`` itself and makes its sessions
    with ``update_config_proto``; an IPUEstimator does both.

    Args:
        cluster_resolver: cluster resolver of the workers.
        ipu_device: device on which replicas compute.
        variables_on_host: whether to keep variables, and so the slots of optimizers, on the host.

    Raises:
        ClusterError: TF_CONFIG or the cluster is wrong.
        Exception: ``tf.errors.UnavailableError``: a worker did not start in time (in graphs at the first run).
    """

    def __init__(self, cluster_resolver: Any, ipu_device: str = _DEVICE, variables_on_host: bool = False) -> None:
        sessions.prepare()
        servers.prepare()
        workers = cluster.read(cluster_resolver)
        self._ring = RingCollectives(workers, cluster.settings()) if workers.size > 1 else None
        self._resolver = cluster_resolver
        super().__init__(self._ring or Alone(), ipu_device, variables_on_host)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that was passed to the strategy."""
        return self._resolver


class IPUHorovodStrategy(HostReducedStrategy):
    """Ranks that ``mpirun`` or ``horovodrun`` started, combined by the engine of ``horovod.tensorflow``.

    Args:
        ipu_device: device on which replicas compute.
        variables_on_host: whether to keep variables, and so the slots of optimizers, on the host.

    Raises:
        ValueError: ``hvd.init()`` was not called.
    """

    def __init__(self, ipu_device: str = _DEVICE, variables_on_host: bool = False) -> None:
        from khorovod_ipu.tensorflow.engine import EngineCollectives

        sessions.prepare()
        super().__init__(EngineCollectives(), ipu_device, variables_on_host)


class IPUStrategy(HostReducedStrategy):
    """One process with one device.

    Args:
        ipu_device: device on which it computes.
        enable_dataset_iterators: accepted.
        enable_keras_extensions: accepted.
    """

    def __init__(
        self, ipu_device: str = _DEVICE, enable_dataset_iterators: bool = True, enable_keras_extensions: bool = True
    ) -> None:
        sessions.prepare()
        super().__init__(Alone(), ipu_device)


class PopDistStrategy(HostReducedStrategy):
    """Instances that ``poprun`` started, combined by the engine of ``horovod.tensorflow``.

    The replicas of an instance run in turn, each with its own copy of variables; they synchronize to combine values.

    Args:
        ipu_device: device on which replicas compute.
        add_ipu_cross_replica_reductions: False does not reduce values of the device.
        enable_dataset_iterators: accepted.
        enable_keras_extensions: whether each replica takes whole batches of Keras' data; False splits every batch among
            the replicas, as TensorFlow's strategies do.

    Raises:
        RuntimeError: the numbers of processes and instances differ.
    """

    supports_loss_scaling = True

    def __init__(
        self,
        ipu_device: str = _DEVICE,
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        import popdist
        from khorovod_ipu.tensorflow.engine import EngineCollectives

        popdist.init()
        sessions.prepare()
        super().__init__(EngineCollectives(), ipu_device, False, popdist.getNumLocalReplicas())
        self.extended._reduces_device_values = add_ipu_cross_replica_reductions
        self.extended.takes_whole_batches = enable_keras_extensions

    def scope(self) -> Any:
        """Return the scope in which variables are created for all replicas."""
        keras_input.prepare()
        return super().scope()

    def update_ipu_config(self, config: Any) -> Any:
        """Store this instance's index in a configuration.

        Args:
            config: an IPUConfig; it is changed and returned.
        """
        distribution = config.experimental.multi_replica_distribution
        distribution.process_count = self.extended._collectives.size
        distribution.process_index = self.extended._collectives.rank
        return config


IPUMultiReplicaStrategy = PopDistStrategy
