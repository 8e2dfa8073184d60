"""A Spark task that holds a rank: it registers with the driver, then serves as its agent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from horovod._version import __version__
from horovod.cgroups import usable_cores
from horovod.config import openmp_threads
from horovod.launch.agent import Agent
from horovod.launch.frames import AgentWire
from horovod.rendezvous.interfaces import machine_name
from horovod.spark.relay import Registration, TaskEnd

__all__ = ["RankTask", "get_available_devices"]

DEVICES_VARIABLE = "_HOROVOD_SPARK_DEVICES"
"""Addresses of the GPUs that Spark gave to a rank's task, as JSON; not a setting."""


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark gave to this rank, by ``spark.task.resource.gpu.amount``."""
    found: list[str] = json.loads(os.environ.get(DEVICES_VARIABLE, "[]"))
    return found


class RankTask:
    """The function of each task, with the signature of ``mapPartitionsWithIndex``.

    Args:
        secret: the job's secret; Spark's own messages carry it.
        endpoints: addresses at which the driver listens.
        timeout_s: seconds to wait for the driver.
        environ: additional environment variables for the rank.
    """

    def __init__(self, secret: bytes, endpoints: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> None:
        self._secret, self._endpoints, self._timeout_s = secret, list(endpoints), timeout_s
        self._environ = dict(environ)

    def __call__(self, index: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Serve the driver until it hangs up. Blocks for as long as the job runs.

        Raises:
            RuntimeError: the process that watches the rank was killed.
        """
        from pyspark import SparkFiles, TaskContext

        context: Any = TaskContext.get()
        devices = context.resources().get("gpu")
        sent = [path for path in sys.path if path.startswith(SparkFiles.getRootDirectory())]  # added by sc.addPyFile
        task = Registration(
            version=__version__,
            partition=index,
            machine=machine_name(),
            nodename=os.uname().nodename,
            python=sys.executable,
            cores=usable_cores(),
            threads=openmp_threads(),
        )
        end = TaskEnd(self._secret, self._endpoints, task, self._timeout_s)
        own = {
            "PYTHONPATH": os.pathsep.join([*sent, os.environ.get("PYTHONPATH", "")]),
            **self._environ,
            DEVICES_VARIABLE: json.dumps(list(devices.addresses) if devices is not None else []),
        }
        wire = AgentWire(end.own.fileno(), os.dup(end.own.fileno()), is_launcher=False)
        agent = Agent(wire, own)
        try:
            agent.run()
        finally:
            agent.close()
            os.close(wire.outgoing)
            end.close()
        if agent.has_lost_ranks:
            raise RuntimeError("the process that watches the rank was killed")  # Spark starts a failed task again
        return iter(())
