"""Strategy for any collectives: the replicas of a worker run in turn, and values are reduced on the host."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute import (
    collective_util,
    distribute_lib,
    distribute_utils,
    input_lib,
    input_util,
    mirrored_strategy,
    numpy_dataset,
    values,
)
from tensorflow.python.distribute.v1 import input_lib as input_lib_v1
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import def_function, record
from tensorflow.python.framework import ops

from khorovod_ipu.tensorflow import keras_input
from khorovod_ipu.tensorflow import replicas as meetings
from khorovod_ipu.tensorflow.collectives import WorkerCollectives
from khorovod_ipu.tensorflow.cross_device import HostReductions

__all__ = ["HostReducedExtended", "HostReducedStrategy"]


class HostReducedStrategy(distribute_lib.Strategy):
    """A strategy whose workers combine tensors on their hosts.

    Args:
        collectives: collectives that combine tensors.
        ipu_device: device on which replicas compute; the software device is part of the host's processor.
        variables_on_host: whether to keep variables, and so the slots of optimizers, on the host.
        replicas: number of replicas of each worker.
    """

    def __init__(
        self,
        collectives: WorkerCollectives,
        ipu_device: str = "/device:IPU:0",
        variables_on_host: bool = False,
        replicas: int = 1,
    ) -> None:
        meetings.prepare_iterators(HostReducedStrategy)
        if replicas > 1:
            meetings.prepare()
        super().__init__(HostReducedExtended(self, collectives, ipu_device, variables_on_host, replicas))

    def experimental_run_v2(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Call ``fn`` on this worker's replicas, under the TensorFlow 1 name of ``run``.

        Args:
            fn: the function to call.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        return self.run(fn, args, kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Combine a value over all workers.

        Args:
            reduce_op: ``tf.distribute.ReduceOp`` or its name.
            value: value of each worker.
            axis: dimension along which to combine, too; None keeps each value's dimensions.
        """
        return super().reduce(reduce_op, value, axis)

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a session's configuration with the settings that this strategy needs.

        Args:
            config_proto: a ``tf.compat.v1.ConfigProto``; is not changed.
        """
        return self.extended._update_config_proto(config_proto)

    def make_dataset_iterator(self, dataset: Any) -> Any:
        """Return an iterator of TensorFlow 1 over a dataset, whose batches are global.

        Args:
            dataset: the same on every worker.
        """
        return self.extended._make_dataset_iterator(dataset)

    def make_input_fn_iterator(self, input_fn: Callable[[Any], Any], replication_mode: Any = None) -> Any:
        """Return an iterator of TensorFlow 1 over the dataset that ``input_fn(input_context)`` returns.

        Args:
            input_fn: called once.
            replication_mode: accepted if it is PER_WORKER: the function is called once per worker.

        Raises:
            ValueError: the mode is another one.
        """
        if replication_mode not in (None, tf.distribute.InputReplicationMode.PER_WORKER):
            raise ValueError(f"make_input_fn_iterator: {replication_mode} is not imitated")
        return self.extended._make_input_fn_iterator(input_fn)


class HostReducedExtended(mirrored_strategy.MirroredExtended):
    """The class of ``strategy.extended``; each replica has a device by name, and a copy of every variable."""

    def __init__(
        self,
        container_strategy: Any,
        collectives: WorkerCollectives,
        ipu_device: str,
        variables_on_host: bool,
        replicas: int = 1,
    ) -> None:
        distribute_lib.StrategyExtendedV1.__init__(self, container_strategy)
        self._collectives = collectives
        self._variables_on_host = variables_on_host
        self._is_begun_later = False  # an Estimator copies worker 0's values to all workers at the start of its session
        #: Whether values of the device are reduced; PopDistStrategy can turn this off.
        self._reduces_device_values = True
        #: Whether each replica takes whole batches; PopDistStrategy turns this on for Keras.
        self.takes_whole_batches = False
        self._whole: Callable[[Any], Any] | None = None
        self._communication_options = collective_util.Options()
        worker = collectives.host.rpartition("/device:")[0]
        self._host_device = collectives.host
        self._task_id = collectives.rank  # for Keras 2: the name of the folder into which other workers save
        self._devices = tuple(worker + device for device in _checked(ipu_device, replicas))
        self._default_device = worker or None
        self._host_input_device = numpy_dataset.SingleDevice(self._host_device)
        self._cross_device_ops = HostReductions(collectives)
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.experimental_enable_get_next_as_optional = True
        # Keep one value per worker, independent of the device's name.
        self._use_var_policy = False

    # -- variables -----------------------------------------------------------------------------------------------

    def _variable_devices(self, synchronization: Any) -> tuple[str, ...]:
        on_host = self._variables_on_host and synchronization != tf.VariableSynchronization.ON_READ
        return (self._host_device,) * len(self._devices) if on_host else self._devices

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        keras_input.prepare()  # also for a Keras that was loaded inside the scope
        colocate_with = kwargs.pop("colocate_with", None)
        if isinstance(colocate_with, numpy_dataset.SingleDevice):
            with tf.device(colocate_with.device):
                return next_creator(**kwargs)
        devices = self._variable_devices(kwargs.get("synchronization"))
        if colocate_with is not None:
            devices = colocate_with._devices

        # The global step begins with 0 on all workers; hooks of single workers read its initial value.
        is_global_step = tf.compat.v1.GraphKeys.GLOBAL_STEP in (kwargs.get("collections") or ())

        def create(**kwargs: Any) -> list[Any]:
            if not is_global_step:
                kwargs["initial_value"] = self._first_workers(kwargs["initial_value"], kwargs.get("dtype"))
            made: list[Any] = []
            for replica, device in enumerate(devices):
                if made:
                    kwargs["name"] = f"{made[0].name.partition(':')[0]}/replica_{replica}/"
                    kwargs["initial_value"] = self._get_variable_creator_initial_value(
                        replica, device, made[0], **kwargs
                    )
                with tf.device(device), eager_context.device_policy(eager_context.DEVICE_PLACEMENT_SILENT):
                    with record.stop_recording():
                        made.append(next_creator(**kwargs))
            return made

        return distribute_utils.create_mirrored_variable(
            self._container_strategy(),
            create,
            distribute_utils.VARIABLE_CLASS_MAPPING,
            distribute_utils.VARIABLE_POLICY_MAPPING,
            **kwargs,
        )

    def _first_workers(self, initial_value: Any, dtype: Any) -> Any:
        if initial_value is None or self._collectives.size == 1 or self._is_begun_later:
            return initial_value

        def value() -> Any:
            found = initial_value() if callable(initial_value) else initial_value
            found = getattr(found, "wrapped_value", found)
            with tf.name_scope("initial_value"), tf.device(self._host_device):
                return self._collectives.broadcast(tf.convert_to_tensor(found, dtype=dtype))

        return value

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        strategy = self._container_strategy()
        if isinstance(fn, def_function.Function):
            # Enter the replica context inside the function, not around its caller: merge_call cannot leave a graph.
            wrapped = self._functions.get(fn)
            if wrapped is None:
                inner = fn.python_function

                def on_replica(*args: Any, **kwargs: Any) -> Any:
                    return self._call_for_each_replica(inner, args, kwargs)

                wrapped = self._functions[fn] = fn._clone(python_function=on_replica)
            return wrapped(*args, **kwargs)
        if len(self._devices) > 1:
            return meetings.call_for_each_replica(strategy, fn, args, kwargs)
        if not tf.executing_eagerly():
            fn = autograph.tf_convert(fn, ag_ctx.control_status_ctx(), convert_by_default=False)
        number = self._get_replica_id_in_sync_group(0)
        with distribute_lib.ReplicaContext(strategy, number), tf.device(self._devices[0]):
            return fn(*distribute_utils.select_replica(0, args), **distribute_utils.select_replica(0, kwargs))

    def _use_merge_call(self) -> bool:
        return len(self._devices) > 1  # a single replica combines its values itself

    # -- combining -----------------------------------------------------------------------------------------------

    def _get_cross_device_ops(self, value: Any) -> Any:
        return self._cross_device_ops

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        def reduced(one: Any) -> Any:
            if isinstance(one, values.Mirrored) and reduce_op == tf.distribute.ReduceOp.MEAN:
                return one
            if self._is_left_alone(one):
                return one
            if not isinstance(one, values.DistributedValues):
                one = one if isinstance(one, tf.IndexedSlices) else tf.convert_to_tensor(one)
                one = values.PerReplica((one,) * len(self._devices))
            to = destinations if not isinstance(destinations, (float, int)) else self._devices[0]
            return self._cross_device_ops.reduce(reduce_op, one, destinations=to, options=options)

        return tf.nest.map_structure(reduced, value)

    def _is_left_alone(self, value: Any) -> bool:
        held = value.values[0] if isinstance(value, values.DistributedValues) else value
        return not self._reduces_device_values and "IPU" in getattr(held, "device", "")

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return self._cross_device_ops._gather(value, destinations=destinations, axis=axis, options=options)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        if any(self._is_left_alone(value) for value, _ in value_destination_pairs):
            return [value for value, _ in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if any(self._is_left_alone(one) for one in tf.nest.flatten(value)):
            return value
        if self._use_merge_call():
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        return self._cross_device_ops._all_reduce(reduce_op, value, 0, options)

    # -- input ---------------------------------------------------------------------------------------------------

    def _input_workers_with_options(self, options: Any = None) -> Any:
        return input_lib.InputWorkers([(self._host_device, (self._host_device,) * len(self._devices))])

    @property
    def _input_workers(self) -> Any:
        return self._input_workers_with_options()

    def _make_input_context(self) -> Any:
        return distribute_lib.InputContext(
            num_input_pipelines=self._collectives.size,
            input_pipeline_id=self._collectives.rank,
            num_replicas_in_sync=self._num_replicas_in_sync,
        )

    @contextlib.contextmanager
    def whole_batches(self, change: Callable[[Any], Any] = lambda dataset: dataset) -> Iterator[None]:
        """Return a context in which distributed datasets give replicas whole batches; ``change`` may replace them."""
        self._whole = change
        try:
            yield
        finally:
            self._whole = None

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self._whole is not None:
            whole = self._whole(dataset)
            return self._distribute_datasets_from_function(lambda _: whole, options)
        # In graphs of TensorFlow 1 datasets need `make_initializable_iterator()`.
        eager = ops.executing_eagerly_outside_functions()
        make = input_util.get_distributed_dataset if eager else input_lib_v1.DistributedDatasetV1
        return make(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=self._num_replicas_in_sync,
            input_context=self._make_input_context(),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        workers, context = self._input_workers_with_options(options), self._make_input_context()
        if not ops.executing_eagerly_outside_functions():
            make = input_lib_v1.DistributedDatasetsFromFunctionV1
            return make(workers, self._container_strategy(), [context], dataset_fn, options)
        return input_util.get_distributed_datasets_from_function(
            dataset_fn, workers, [context], self._container_strategy(), options
        )

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        numbers = [self._get_replica_id_in_sync_group(replica) for replica in range(len(self._devices))]
        contexts = [distribute_lib.ValueContext(number, self._num_replicas_in_sync) for number in numbers]
        return distribute_utils.regroup(tuple(value_fn(context) for context in contexts), always_wrap=True)

    def _make_dataset_iterator(self, dataset: Any) -> Any:
        return input_lib_v1.DatasetIterator(
            dataset,
            self._input_workers,
            self._container_strategy(),
            num_replicas_in_sync=self._num_replicas_in_sync,
            input_context=self._make_input_context(),
        )

    def _make_input_fn_iterator(self, input_fn: Any, replication_mode: Any = None) -> Any:
        return input_lib_v1.InputFunctionIterator(
            input_fn, self._input_workers, [self._make_input_context()], self._container_strategy()
        )

    def _configure(
        self, session_config: Any = None, cluster_spec: Any = None, task_type: Any = None, task_id: Any = None
    ) -> None:
        if session_config:
            session_config.CopyFrom(self._update_config_proto(session_config))

    def _update_config_proto(self, config_proto: Any) -> Any:
        updated = getattr(self._collectives, "updated", None)
        if updated is not None:
            return updated(config_proto)
        return super()._update_config_proto(config_proto)

    def _in_multi_worker_mode(self) -> bool:
        # TensorFlow's iterators read this: a replica without a batch then gets an empty one while others have data.
        return self._num_replicas_in_sync > 1

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._collectives.size * len(self._devices)

    @property
    def _num_workers(self) -> int:
        return self._collectives.size

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._collectives.rank * len(self._devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group % len(self._devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of variables."""
        return self._variable_devices(None)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the devices of an optimizer's own variables.

        Args:
            var_list: the variables that it optimizes.
        """
        return self.parameter_devices

    @property
    def experimental_between_graph(self) -> bool:
        """Return True: every worker has its own graph."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints and summaries: only worker 0 does."""
        return self._collectives.rank == 0

    should_save_summary = should_checkpoint


def _checked(device: str, replicas: int) -> list[str]:
    """Return the devices of this worker's replicas, starting from the named one."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type is None or spec.job is not None:
        raise ValueError(f"ipu_device must be a device of this worker, such as /device:IPU:0. Received: {device!r}")
    first = spec.device_index or 0
    return [f"/device:{spec.device_type}:{first + replica}" for replica in range(replicas)]
