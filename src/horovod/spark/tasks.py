"""Start the driver's tasks that hold ranks, and wait until they have registered."""

from __future__ import annotations

import secrets
import time

from horovod import config
from horovod._version import __version__
from horovod.errors import LaunchError
from horovod.launch.elastic_options import seconds
from horovod.launch.workers import listen_addresses
from horovod.spark.application import Application, TaskJob
from horovod.spark.options import JobOptions
from horovod.spark.relay import Registration, TaskConnection, TaskListener
from horovod.spark.task import RankTask

__all__ = ["MachineNames", "RankTasks", "rank_count"]

#: Interval in seconds at which to check that Spark has not aborted the job, and has enough slots.
_LOOK_S = 0.5


def rank_count(application: Application, num_proc: int | None) -> int:
    """Return the number of ranks to start with.

    Args:
        application: the application.
        num_proc: the user's number; Spark's default number of tasks when None.

    Raises:
        ValueError: less than 1.
    """
    found = application.parallelism if num_proc is None else num_proc
    if not hasattr(found, "__index__") or found < 1:
        raise ValueError(f"num_proc must be at least 1; received {found!r}")
    return found


class RankTasks:
    """Tasks of the active Spark application; each serves the driver as an agent.

    Args:
        options: the user's options.
        wanted: number of tasks to wait for; Spark's default number of tasks when None.
        most: maximum number of tasks; the same as ``wanted`` when None.
        start_timeout_s: seconds to wait for the tasks; the value in the settings when None.
        runs_again: whether Spark may restart a failed or lost task.

    Raises:
        RuntimeError: there is no SparkContext in this process.
        ValueError: the number of tasks is less than 1, or the timeout is negative.
        InitError: a network interface does not exist.
    """

    def __init__(
        self, options: JobOptions, wanted: int | None, most: int | None, start_timeout_s: float | None, runs_again: bool
    ) -> None:
        given = seconds(start_timeout_s, "start_timeout")
        self.timeout_s = config.load(spark_start_timeout_s=given).spark_start_timeout_s
        self._application = Application()
        self.wanted = rank_count(self._application, wanted)
        self.most = max(self.wanted, most or 0)
        self._name, self._runs_again = options.name, runs_again
        self._has_begun = False  # ranks may run

        self._refuse_shortage()
        secret = secrets.token_bytes(32)
        self.listener = TaskListener(secret, listen_addresses(options.interfaces), self._objection)
        task = RankTask(secret, self.listener.endpoints, self.timeout_s, options.environ)
        self.job = TaskJob(self._application, self.most, task, options.name)

    def _objection(self, task: Registration) -> str:
        if task.version != __version__:
            return f"{task.nodename} has horovod {task.version}, and the driver {__version__}: install the same version"
        if self._has_begun and not self._runs_again:
            return (
                f"Spark has started task {task.partition} of {self._name} again, which had failed or was lost: the "
                f"ranks of a job of fixed size run once. Call {self._name} again, or use horovod.spark.run_elastic"
            )
        return ""

    def _refuse_shortage(self) -> None:
        if why := self._application.shortage(self.wanted):
            raise LaunchError(why)

    def wait(self) -> list[TaskConnection]:
        """Wait until enough tasks have registered; return them in the order of their partitions.

        Raises:
            LaunchError: Spark did not start the tasks in time, has too few slots, or has ended the job.

        Blocks until enough tasks have registered, at most for the start timeout.
        """
        found: dict[int, TaskConnection] = {}
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                for connection in self.listener.arrivals(_LOOK_S):
                    partition = connection.registration.partition
                    if partition in found:  # Spark has restarted it
                        found[partition].close()
                    found[partition] = connection
                if len(found) >= self.wanted:
                    self._has_begun = True
                    return [found[partition] for partition in sorted(found)]
                for partition in [each for each, connection in found.items() if connection.is_lost()]:
                    found.pop(partition).close()
                self._look(len(found), deadline)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise

    def _look(self, count: int, deadline: float) -> None:
        """Raise an error if waiting is useless."""
        if self.job.has_ended:
            raise LaunchError(f"Spark has ended the tasks of {self._name}: {self.job.failure() or 'no failure'}")
        self._refuse_shortage()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Spark has started {count} of {self.wanted} tasks within {self.timeout_s:g} s (start_timeout, or "
                f"HOROVOD_SPARK_START_TIMEOUT). Do other jobs of the application occupy its slots?"
            )

    def aborted(self) -> str:
        """Return that Spark has aborted the job of the tasks, and why, on one line; empty if it has not."""
        why = self.job.failure().partition("\n")[0]
        return why and f"Spark has aborted the job of the tasks: {why}"

    def close(self, is_well: bool) -> None:
        """Wait for the tasks, or cancel them, and stop listening.

        Args:
            is_well: whether the tasks were asked to end.
        """
        self.job.close(is_well)
        self.listener.close()


class MachineNames:
    """Unique names of hosts: the host's own name, and a number if another host has the same name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by machine

    def name(self, task: Registration) -> str:
        """Return the name of a task's host.

        Args:
            task: registration of a task on that host.
        """
        if task.machine not in self._names:
            taken, name, number = self._names.values(), task.nodename, 1
            while name in taken:
                number += 1
                name = f"{task.nodename}-{number}"
            self._names[task.machine] = name
        return self._names[task.machine]
