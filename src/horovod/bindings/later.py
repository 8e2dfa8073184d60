"""Names of Horovod that this version does not have, and the feature each of them belongs to.

Whoever asks for one is told so, instead of "has no attribute" or "no module named". Each module among them is a
file that raises ImportError, so that scripts that try an import and go on without it keep working.
"""

from __future__ import annotations

__all__ = ["INSTEAD", "LATER", "NOT_PLANNED", "explain"]

_ELASTIC = "elastic jobs, which go on when hosts come and go"

#: Name below ``horovod`` to feature.
LATER: dict[str, str] = {
    "common.elastic": _ELASTIC,
    "torch.elastic": _ELASTIC,
    "tensorflow.elastic": _ELASTIC,
    "tensorflow.keras.elastic": _ELASTIC,
    "keras.elastic": _ELASTIC,
    "runner.elastic": _ELASTIC,
}

_RUN = "horovod.run() and horovodrun start jobs"
_HOSTS = "horovod.run(hosts=...) and horovodrun -H take host:slots,host:slots, and hostfile= a file of hosts"

#: The same for parts of Horovod's launcher that it used itself, and what there is for scripts instead.
INSTEAD: dict[str, str] = {
    "runner.common.service": _RUN,
    "runner.common.util.codec": "hvd.broadcast_object() sends objects; pickle and base64 make them text",
    "runner.common.util.config_parser": f"{_RUN}, with --config-file",
    "runner.common.util.host_hash": "hvd.local_rank() and hvd.cross_rank() say who is where",
    "runner.common.util.hosts": _HOSTS,
    "runner.common.util.network": "hvd.broadcast_object() and hvd.allgather_object() send objects",
    "runner.common.util.safe_shell_exec": "subprocess runs commands; what ranks have started ends with horovodrun",
    "runner.common.util.secret": "every job has a key of its own; secrets.token_bytes() makes others",
    "runner.common.util.settings": _RUN,
    "runner.common.util.timeout": "HOROVOD_START_TIMEOUT and --start-timeout limit the start",
    "runner.common.util.tiny_shell_exec": "subprocess runs commands",
    "runner.driver": _RUN,
    "runner.gloo_run": _RUN,
    "runner.http": _RUN,
    "runner.js_run": f"{_RUN}, with --mpi under LSF, too",
    "runner.mpi_run": f"{_RUN}, with --mpi or use_mpi=True through mpirun",
    "runner.run_task": _RUN,
    "runner.task": _RUN,
    "runner.task_fn": _RUN,
    "runner.util": _RUN,
}

NOT_PLANNED: dict[str, str] = {
    "mxnet": "MXNet, which is retired",
    "ray": "Ray",
    "spark": "Apache Spark",
}


def explain(name: str) -> str:
    """Return what to say to somebody who asks for ``name``, or an empty text.

    Args:
        name: without the leading ``horovod.``.
    """
    if name in LATER:
        return f"horovod.{name} belongs to {LATER[name]}: a later version of khorovod will have it, this one does not"
    if name in NOT_PLANNED:
        return f"horovod.{name} belongs to {NOT_PLANNED[name]}: khorovod does not have it"
    if name in INSTEAD:
        return f"horovod.{name} belongs to Horovod's own launcher, and khorovod does not have it: {INSTEAD[name]}"
    return ""
