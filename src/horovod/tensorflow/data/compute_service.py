"""Data preparation in a separate job with TensorFlow's data service.

The compute job is ``horovodrun -np N python -m horovod.tensorflow.data.compute_worker CONFIGFILE``. Its ranks are
TensorFlow's data service workers. It writes a file that tells the training job their addresses::

    config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size())
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod.errors import LaunchError
from horovod.tensorflow.data.registry import ComputeClient
from horovod.tensorflow.mpi_ops import init, local_size, rank, size

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "host_here", "send_to_data_service", "tf_data_service"]

_LOOK_S = 0.1
_service = tf.data.experimental.service


@dataclass(frozen=True)
class TfDataServiceConfig:
    """Addresses and structure of a data service.

    Attributes:
        dispatchers: number of dispatchers.
        workers_per_dispatcher: number of workers of each dispatcher.
        dispatcher_side: the job that runs the dispatchers: ``compute`` or ``training``.
        addresses: hosts and ports of the compute job's registry.
        key: secret key that its clients need.
        timeout: seconds to wait for dispatchers and workers to register.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: tuple[tuple[str, int], ...]
    key: bytes
    timeout: float = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client of the registry.

        Args:
            verbose: accepted and ignored.
        """
        return ComputeClient(self.addresses, self.key, self.dispatchers, self.workers_per_dispatcher, self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a JSON-compatible dictionary."""
        return {**asdict(self), "key": base64.b64encode(self.key).decode("ascii")}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """Return the configuration from a result of ``to_dict``.

        Args:
            config: the dictionary.
        """
        addresses = tuple((host, int(port)) for host, port in config["addresses"])
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": base64.b64decode(config["key"])})

    def write(self, filename: str) -> None:
        """Write a file for ``read``; only this user can read it, because it holds the key.

        Args:
            filename: path of the file; an existing file is replaced atomically.
        """
        path = Path(filename)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(self.to_dict(), file)
        partial.replace(path)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Return the configuration of a file.

        Args:
            filename: path of a file written by ``write``.
            wait_for_file_creation: whether to wait until the file exists.
        """
        path = Path(filename)
        while wait_for_file_creation and not path.exists():
            time.sleep(_LOOK_S)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))


def host_here() -> str:
    """Return the host name by which other processes of the job reach this host."""
    return "localhost" if local_size() == size() else socket.gethostname()


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Return a context that uses a data service; rank 0 ends the service at the end of the context.

    Args:
        compute_config: configuration of the service.
        rank: this rank of the training job.

    Yields:
        The address of the dispatcher for this rank.

    Raises:
        LaunchError: dispatchers or workers did not register within the configuration's timeout.
    """
    compute = compute_config.compute_client()
    server = None
    try:
        if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
            server = _dispatcher(compute, rank)
        index = rank % compute_config.dispatchers
        address = compute.wait_for_dispatcher_registration(index, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(index, compute_config.timeout)
        yield address
    finally:
        if rank == 0:
            with contextlib.suppress(LaunchError):
                compute.shutdown()
        del server


def _dispatcher(compute: ComputeClient, index: int) -> Any:
    server = _service.DispatchServer(_service.DispatcherConfig(port=0))
    _, _, port = server.target.rpartition(":")
    compute.register_dispatcher(index, f"grpc://{host_here()}:{port}")
    return server


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a dataset whose elements the data service prepares; also a method of ``tf.data.Dataset``.

    The service runs until its job ends, or until a call of ``compute_config.compute_client().shutdown()``.

    Args:
        dataset: the dataset to prepare.
        compute_config: configuration of a service whose dispatchers run in the compute job.
        rank: this rank of the training job.
        size: number of ranks of the training job; needed for ``round_robin``.
        processing_mode: TensorFlow's processing mode, such as ``distributed_epoch`` or ``parallel_epochs``.
        reuse_dataset: whether all ranks of a dispatcher share one pass over the dataset.
        round_robin: whether ranks receive elements in turn; needs ``reuse_dataset`` and ``size``.

    Raises:
        RuntimeError: the dispatchers run in the training job; use ``tf_data_service`` instead.
        ValueError: ``round_robin`` without ``reuse_dataset`` or ``size``.
        LaunchError: dispatchers or workers did not register within the configuration's timeout.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError("training side dispatcher not supported, use tf_data_service context manager instead")
    if round_robin and (not reuse_dataset or size is None):
        raise ValueError("round_robin needs reuse_dataset=True and size=hvd.size()")
    compute = compute_config.compute_client()
    index = rank % compute_config.dispatchers
    address = compute.wait_for_dispatcher_registration(index, compute_config.timeout)
    compute.wait_for_dispatcher_worker_registration(index, compute_config.timeout)
    consumers = len(range(index, size, compute_config.dispatchers)) if round_robin and size is not None else None
    return dataset.apply(
        _service.distribute(
            processing_mode=processing_mode,
            service=address,
            job_name="job" if reuse_dataset else None,
            consumer_index=rank // compute_config.dispatchers if round_robin else None,
            num_consumers=consumers,
        )
    )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run one worker of a data service, and on some ranks a dispatcher, until the service ends.

    Args:
        compute_config: configuration of the service.

    Raises:
        LaunchError: the dispatcher did not register within the configuration's timeout.
    """
    init()
    compute = compute_config.compute_client()
    index = rank() // compute_config.workers_per_dispatcher
    server = None
    if compute_config.dispatcher_side == "compute" and rank() % compute_config.workers_per_dispatcher == 0:
        server = _dispatcher(compute, index)
    address = compute.wait_for_dispatcher_registration(index, compute_config.timeout).partition("://")[2]
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    config = _service.WorkerConfig(dispatcher_address=address, worker_address=f"{host_here()}:{port}", port=port)
    worker = _service.WorkerServer(config)
    compute.register_worker_for_dispatcher(index, rank())
    compute.wait_for_shutdown()
    worker._stop()
    del server
