"""The server of this worker, which TensorFlow's own collectives need."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import threading
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.training import server_lib

from khorovod_ipu.tensorflow.cluster import Cluster, ClusterError

__all__ = ["limit_exit", "note", "note_leader", "prepare", "target_of"]

#: Servers by address; they cannot be stopped, so there is one per address and process.
_servers: dict[str, Any] = {}
#: Leader of the collectives, by server address; a server needs it at its start.
_leaders: dict[str, str] = {}
#: Maximum seconds for the interpreter's exit, including its atexit work.
_EXIT_S = 300.0


class _Running(NamedTuple):
    """Placeholder for a server that eager execution has started."""

    target: str


def note(address: str) -> None:
    """Record that eager execution has started the server at an address.

    Args:
        address: host and port.
    """
    _servers[address] = _Running(f"grpc://{address}")


@functools.cache
def limit_exit() -> None:
    """Limit the time of the interpreter's exit, during which TensorFlow shuts its servers down without a limit.

    At the limit the process ends with code 1, and prints the stacks of its threads on stderr.
    """
    atexit.register(lambda: faulthandler.dump_traceback_later(_EXIT_S, exit=True))


def note_leader(cluster: Cluster) -> None:
    """Record the leader of the collectives of this worker's server."""
    _leaders[cluster.addresses[cluster.rank]] = cluster.device(0)


def target_of(cluster: Cluster, session_config: Any) -> str:
    """Return the sessions' target for this worker's server; start the server if it does not run.

    Raises:
        ValueError: the port is in use.
    """
    address = cluster.addresses[cluster.rank]
    if address not in _servers:
        job, index = cluster.tasks[cluster.rank]
        session_config.allow_soft_placement = True
        try:
            _servers[address] = tf.distribute.Server(
                cluster.jobs, job_name=job, task_index=index, protocol=cluster.protocol, config=session_config
            )
        except tf.errors.OpError as error:
            raise ClusterError(
                f"the server of {cluster.describe(cluster.rank)}, this worker, could not start: {error.message}. Is "
                "the port in use by another process, such as a worker with the same index in TF_CONFIG?"
            ) from error
    return str(_servers[address].target)


def prepare() -> None:
    """Let TensorFlow 1 scripts "start" a server that eager execution has already started; call it once per process."""
    plain = server_lib.Server.__init__
    if hasattr(plain, "_khorovod"):
        return

    @functools.wraps(plain)
    def init(self: Any, server_or_cluster_def: Any, *args: Any, **kwargs: Any) -> None:
        wanted = _address(server_or_cluster_def, *args, **kwargs)
        if isinstance(_servers.get(wanted), _Running):
            self._server = _servers[wanted]
            return
        if wanted in _leaders and len(args) < 4:
            config = tf.compat.v1.ConfigProto()
            config.CopyFrom(kwargs.get("config") or config)
            config.experimental.collective_group_leader = _leaders[wanted]
            kwargs["config"] = config
        plain(self, server_or_cluster_def, *args, **kwargs)

    init._khorovod = True  # type: ignore[attr-defined]
    server_lib.Server.__init__ = init
    _let_stand_ins_answer()


def _let_stand_ins_answer() -> None:
    """Give the placeholder server that a script gets instead of a second one its target, ``start`` and ``join``."""
    plain = server_lib.Server
    target, start, join = plain.target, plain.start, plain.join

    def target_of_either(self: Any) -> str:
        return self._server.target if isinstance(self._server, _Running) else str(target.__get__(self))

    def start_either(self: Any) -> None:
        if not isinstance(self._server, _Running):  # a placeholder's server already runs
            start(self)

    def join_either(self: Any) -> None:
        if isinstance(self._server, _Running):  # like TensorFlow's own server, it never ends
            threading.Event().wait()
        join(self)

    plain.target, plain.start, plain.join = property(target_of_either), start_either, join_either


def _address(definition: Any, job_name: Any = None, task_index: Any = None, *_: Any, **__: Any) -> str:
    """Return the address of a server from its arguments; empty if they do not contain it."""
    try:
        if hasattr(definition, "job_name"):
            job_name, task_index, definition = definition.job_name, definition.task_index, definition.cluster
        return str(tf.train.ClusterSpec(definition).task_address(job_name, task_index or 0))
    except (TypeError, ValueError):
        return ""
