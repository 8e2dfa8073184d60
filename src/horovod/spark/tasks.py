"""The tasks of a driver that hold ranks: starts them, and waits until they have registered."""

from __future__ import annotations

import secrets
import time

from horovod import config
from horovod._version import __version__
from horovod.errors import LaunchError
from horovod.launch.workers import listen_addresses
from horovod.spark.application import Application, TaskJob
from horovod.spark.options import JobOptions
from horovod.spark.relay import Registration, TaskConnection, TaskListener
from horovod.spark.task import RankTask

__all__ = ["MachineNames", "RankTasks"]

#: How often to look whether Spark has given up, or will not give enough slots.
_LOOK_S = 0.5


class RankTasks:
    """Tasks of the active Spark application, each of which serves the driver as an agent.

    Args:
        options: what the user wants.
        wanted: number of tasks to wait for; Spark's default parallelism when None.
        most: number of tasks that Spark may run; as many when None.
        start_timeout_s: how long to wait for them; that of the settings when None.
        runs_again: whether Spark may start a task again that has failed or was lost.

    Raises:
        RuntimeError: there is no SparkContext in this process.
        ValueError: there is to be no task.
        InitError: there is no such interface.
    """

    def __init__(
        self, options: JobOptions, wanted: int | None, most: int | None, start_timeout_s: float | None, runs_again: bool
    ) -> None:
        self.timeout_s = config.load(spark_start_timeout_s=start_timeout_s).spark_start_timeout_s
        self._application = Application()
        self.wanted = self._application.parallelism if wanted is None else wanted
        if not hasattr(self.wanted, "__index__") or self.wanted < 1:
            raise ValueError(f"num_proc must be at least 1; received {wanted!r}")
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
        """Return the tasks in the order of their partitions, as soon as enough have registered.

        Raises:
            LaunchError: Spark has not started them in time, has too few slots, or has ended the job.

        Blocks until then, for the start timeout at most.
        """
        found: dict[int, TaskConnection] = {}
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                for connection in self.listener.arrivals(_LOOK_S):
                    partition = connection.registration.partition
                    if partition in found:  # Spark has started it again
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
        """Raise what makes waiting useless."""
        if self.job.has_ended:
            raise LaunchError(f"Spark has ended the tasks of {self._name}: {self.job.failure() or 'no failure'}")
        self._refuse_shortage()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Spark has started {count} of {self.wanted} tasks within {self.timeout_s:g} s (start_timeout, or "
                f"HOROVOD_SPARK_START_TIMEOUT). Do other jobs of the application occupy its slots?"
            )

    def close(self, is_well: bool) -> None:
        """Wait for the tasks, or cancel them, and listen no more.

        Args:
            is_well: whether they have been told to end.
        """
        self.job.close(is_well)
        self.listener.close()


class MachineNames:
    """Names of hosts: what each calls itself, and a number if another one has the same name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by machine

    def name(self, task: Registration) -> str:
        """Return the name of a task's host.

        Args:
            task: on that host.
        """
        if task.machine not in self._names:
            taken, name, number = self._names.values(), task.nodename, 1
            while name in taken:
                number += 1
                name = f"{task.nodename}-{number}"
            self._names[task.machine] = name
        return self._names[task.machine]
