"""The server of this worker, where TensorFlow's own collectives need one."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import threading
from typing import Any

import tensorflow as tf
from tensorflow.python.training import server_lib

from khorovod_ipu.tensorflow.cluster import Cluster, ClusterError

__all__ = ["limit_exit", "note", "note_leader", "prepare", "target_of"]

#: Servers cannot be stopped: one per address and process. None stands for one that eager execution has started.
_servers: dict[str, Any] = {}
#: The leader of the collectives of each server, which needs it when it starts.
_leaders: dict[str, str] = {}
#: How many seconds the interpreter may take to end, with what else ends with it.
_EXIT_S = 300.0


class _Running:
    """Stands for a server that eager execution has started.

    Args:
        address: of it.
    """

    def __init__(self, address: str) -> None:
        self.target = f"grpc://{address}"


def note(address: str) -> None:
    """Remember that eager execution has started the server of an address.

    Args:
        address: host and port.
    """
    _servers[address] = None


@functools.cache
def limit_exit() -> None:
    """Let the process end when its interpreter does not: TensorFlow's servers are taken down then, without a limit.

    It ends with code 1, and says on stderr where its threads were.
    """
    atexit.register(lambda: faulthandler.dump_traceback_later(_EXIT_S, exit=True))


def note_leader(cluster: Cluster) -> None:
    """Remember the leader of the collectives of this worker's server.

    Args:
        cluster: the workers.
    """
    _leaders[cluster.addresses[cluster.rank]] = cluster.device(0)


def target_of(cluster: Cluster, session_config: Any) -> str:
    """Return where sessions find this worker's server; start it if it does not run.

    Args:
        cluster: the workers.
        session_config: of the sessions.

    Raises:
        ValueError: the port is in use.
    """
    address = cluster.addresses[cluster.rank]
    if _servers.get(address) is None and address not in _servers:
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
    server = _servers[address]
    return str(server.target) if server is not None else _Running(address).target


def prepare() -> None:
    """Let scripts of TensorFlow 1 start a server that eager execution has started already; once per process."""
    plain = server_lib.Server.__init__
    if hasattr(plain, "_khorovod"):
        return

    @functools.wraps(plain)
    def init(self: Any, server_or_cluster_def: Any, *args: Any, **kwargs: Any) -> None:
        wanted = _address(server_or_cluster_def, *args, **kwargs)
        if wanted in _servers and _servers[wanted] is None:
            self._server = _Running(wanted)
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
    """Let the server that a script has got instead of a second one say where sessions find it, start, and be joined."""
    plain = server_lib.Server
    target, start, join = plain.target, plain.start, plain.join

    def target_of_either(self: Any) -> str:
        return self._server.target if isinstance(self._server, _Running) else str(target.__get__(self))

    def start_either(self: Any) -> None:
        if not isinstance(self._server, _Running):  # that runs already
            start(self)

    def join_either(self: Any) -> None:
        if isinstance(self._server, _Running):  # as TensorFlow's own, it never ends
            threading.Event().wait()
        join(self)

    plain.target, plain.start, plain.join = property(target_of_either), start_either, join_either


def _address(definition: Any, job_name: Any = None, task_index: Any = None, *_: Any, **__: Any) -> str:
    """Return the address of a server from its arguments; empty if they do not say it."""
    try:
        if hasattr(definition, "job_name"):
            job_name, task_index, definition = definition.job_name, definition.task_index, definition.cluster
        return str(tf.train.ClusterSpec(definition).task_address(job_name, task_index or 0))
    except (TypeError, ValueError):
        return ""
