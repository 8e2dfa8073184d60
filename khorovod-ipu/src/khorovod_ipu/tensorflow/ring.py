"""Collectives over TensorFlow's own rings, between the gRPC servers of the workers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.distribute import collective_util, cross_device_utils
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import ops
from tensorflow.python.ops import collective_ops

from horovod.config import Config
from khorovod_ipu.tensorflow import servers
from khorovod_ipu.tensorflow.cluster import Cluster, ClusterError, check_port, fail_fast
from khorovod_ipu.tensorflow.collectives import WorkerCollectives
from khorovod_ipu.tensorflow.peers import WorkerLostError, WorkerWatch

__all__ = ["RingCollectives"]

#: The dtypes that TensorFlow's rings can sum; other numbers are converted to one of these.
_SUMMED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
_SENT = (*_SUMMED, tf.bool)
#: Rank of this process, by the addresses of all workers.
_own_ranks: dict[tuple[str, ...], int] = {}
#: One group key per strategy, in order of creation; distinct from those of TensorFlow's own strategies.
_groups = itertools.count(7061)


class RingCollectives(WorkerCollectives):
    """TensorFlow's ring collectives between the workers of a cluster.

    With eager execution it starts this worker's server immediately, unless the script has started one, and waits for
    all others. In graphs of TensorFlow 1 the script, or the Estimator, starts the server.

    Args:
        cluster: the workers.
        settings: timeouts for the start of workers, and for a tensor of a running worker.

    Raises:
        ClusterError: this process is another worker of the same cluster.
    """

    def __init__(self, cluster: Cluster, settings: Config) -> None:
        own = _own_ranks.setdefault(cluster.addresses, cluster.rank)
        if own != cluster.rank:
            raise ClusterError(
                f"this process is {cluster.describe(own)} already. Received: {cluster.describe(cluster.rank)}. Start "
                "each worker in a process of its own"
            )
        self.cluster = cluster
        self.rank = cluster.rank
        self.size = cluster.size
        self.host = cluster.device(cluster.rank, "/device:CPU:0")
        self.start_timeout_s = settings.start_timeout_s
        self.watch = WorkerWatch(cluster, self._abort)
        self._is_eager = ops.executing_eagerly_outside_functions()
        self._launchers: dict[bool, Any] = {}
        self._running: list[Any] = []
        self._keys = cross_device_utils.CollectiveKeys(group_key_start=next(_groups))
        self._group = self._keys.get_group_key([self.host])
        self._limit_s = 0.0 if settings.stall_check_disable else settings.stall_shutdown_s
        self._options = collective_util.Options(
            timeout_seconds=self._limit_s or None, implementation=collective_util.CommunicationImplementation.RING
        )
        fail_fast()
        servers.note_leader(cluster)
        has_server = check_port(cluster)
        if self._is_eager and not has_server:
            self._start_server()

    def _start_server(self) -> None:
        runtime = eager_context.context()
        try:
            runtime.configure_collective_ops(
                collective_leader=self.cluster.device(0), device_filters=(self.cluster.device(self.rank),)
            )
        except RuntimeError as error:
            raise RuntimeError(
                "with eager execution the strategy must be made before TensorFlow does anything else: its server "
                f"starts with TensorFlow itself ({error})"
            ) from None
        job, index = self.cluster.tasks[self.rank]
        config = self.updated(copy.deepcopy(runtime.config))
        definition = tensorflow_server_pb2.ServerDef(
            cluster=tf.train.ClusterSpec(self.cluster.jobs).as_cluster_def(),
            default_session_config=config,
            job_name=job,
            task_index=index,
            protocol=self.cluster.protocol,
        )
        runtime.enable_collective_ops(definition)
        runtime.ensure_initialized()
        servers.note(self.cluster.addresses[self.rank])
        self.wait_for_workers()

    def updated(self, config: Any) -> Any:
        """Return a session's configuration with the settings that the rings need.

        Args:
            config: a ``tf.compat.v1.ConfigProto``; is not changed.
        """
        changed = copy.deepcopy(config)
        changed.isolate_session_state = True
        changed.experimental.collective_group_leader = self.cluster.device(0)
        del changed.device_filters[:]
        changed.device_filters.append(self.cluster.device(self.rank))
        return changed

    def wait_for_workers(self) -> None:
        """Wait until all workers' servers run, and watch them from then on.

        Raises:
            Exception: ``tf.errors.UnavailableError``: a worker did not start in time.
        """
        try:
            if self.watch.wait_for_all(self.start_timeout_s):
                servers.limit_exit()
        except WorkerLostError as error:
            raise tf.errors.UnavailableError(None, None, str(error)) from None

    def out_of_step(self) -> str:
        """Return the error text for a collective that exceeded its time limit."""
        lost = self.watch.lost()
        return lost or (
            f"{self.cluster.describe(self.rank)}, this worker, waited {self._limit_s:g} s for a tensor of the others. "
            f"All {self.size} workers are there, but one has not come to this operation: it does something else, or "
            "has fewer batches. HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is the limit; 0 is none"
        )

    @contextlib.contextmanager
    def ends_when_one_is_lost(self, session: Any) -> Iterator[None]:
        """Return a context that closes a session when a worker is lost: otherwise TensorFlow would wait for the worker.

        Args:
            session: runs within the block.
        """
        self._running.append(session)
        try:
            if self.watch.lost():
                session.close()
            yield
        finally:
            self._running.remove(session)

    def _abort(self, who: str) -> None:
        for session in list(self._running):
            session.close()
        if self._is_eager:
            eager_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, who)

    def _launcher(self) -> Any:
        is_eager = ops.executing_eagerly_outside_functions()
        if is_eager not in self._launchers:
            self._launchers[is_eager] = cross_device_utils.CollectiveReplicaLauncher(
                self._group, self.size, self._keys, self.host, self._options
            )
        return self._launchers[is_eager]

    def _mark(self) -> None:
        # Sessions of this graph wait for the workers, and name lost workers.
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        graph._khorovod_workers = self

    def reduce(self, tensor: Any, mean: bool) -> Any:
        self._mark()
        if isinstance(tensor, tf.IndexedSlices):
            values = self.gather(tensor.values)
            indices = self.gather(tensor.indices)
            return tf.IndexedSlices(values / self.size if mean else values, indices, tensor.dense_shape)
        sent = tensor if tensor.dtype in _SUMMED else tf.cast(tensor, tf.int64)
        total = self._launcher().all_reduce(tf.identity(sent))
        total.set_shape(tensor.shape)
        if mean:
            total = total / self.size if total.dtype.is_floating else total // self.size
        return tf.cast(total, tensor.dtype)

    def gather(self, tensor: Any) -> Any:
        self._mark()
        gather = self._launcher().all_gather
        sent = tensor if tensor.dtype in _SUMMED else tf.cast(tensor, tf.int64)
        if tf.executing_eagerly():
            everything = tf.function(lambda value: gather(value, 0))(sent)
        else:
            everything = gather(sent, 0)
            everything.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        return tf.cast(everything, tensor.dtype)

    def broadcast(self, tensor: Any) -> Any:
        self._mark()
        sent = tensor if tensor.dtype in _SENT else tf.cast(tensor, tf.int64)
        key, shape, dtype = self._keys.get_instance_key(self._group, self.host), sent.shape, sent.dtype
        call = (self.size, self._group, key)
        with tf.device(self.host):
            if self.rank:
                result = collective_ops.broadcast_recv(shape, dtype, *call, timeout=self._limit_s)
            else:
                done = collective_ops.broadcast_send(sent, shape, dtype, *call, timeout=self._limit_s)
                with tf.control_dependencies([done]):
                    result = tf.identity(sent)
        return tf.cast(result, tensor.dtype)
