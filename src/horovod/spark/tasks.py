"""The tasks of a driver that hold ranks: starts them, and waits until they have registered."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from horovod import config
from horovod._version import __version__
from horovod.errors import LaunchError
from horovod.launch.workers import listen_addresses
from horovod.spark.application import Application, TaskJob
from horovod.spark.relay import Registration, TaskConnection, TaskListener
from horovod.spark.task import RankTask

__all__ = ["RankTasks"]

#: How often to look whether Spark has given up, or will not give enough slots.
_LOOK_S = 0.5


class RankTasks:
    """Tasks of the active Spark application, each of which serves the driver as an agent.

    Args:
        count: number of tasks; Spark's default parallelism when None.
        name: of the job, for messages and Spark's pages.
        start_timeout_s: how long to wait for all of them; that of the settings when None.
        interfaces: network interfaces at which they find the driver; all when empty.
        runs_again: whether Spark may start a task again that has failed or was lost.

    Raises:
        RuntimeError: there is no SparkContext in this process.
        ValueError: there is to be no task.
        InitError: there is no such interface.
    """

    def __init__(
        self, count: int | None, name: str, start_timeout_s: float | None, interfaces: Sequence[str], runs_again: bool
    ) -> None:
        self.timeout_s = config.load(spark_start_timeout_s=start_timeout_s).spark_start_timeout_s
        self._application = Application()
        self.count = self._application.parallelism if count is None else count
        if self.count < 1:
            raise ValueError(f"num_proc must be at least 1; received {count}")
        self._name, self._seen, self._runs_again = name, set[int](), runs_again
        self._refuse_shortage()
        secret = secrets.token_bytes(32)
        self.listener = TaskListener(secret, listen_addresses(interfaces), self._objection)
        task = RankTask(secret, self.listener.endpoints, self.timeout_s)
        self.job = TaskJob(self._application, self.count, task, name)

    def _objection(self, task: Registration) -> str:
        if task.version != __version__:
            return f"{task.nodename} has horovod {task.version}, and the driver {__version__}: install the same version"
        if task.partition in self._seen and not self._runs_again:
            return (
                f"Spark has started task {task.partition} of {self._name} again, which had failed or was lost: the "
                f"ranks of a job of fixed size run once. Call {self._name} again, or use horovod.spark.run_elastic"
            )
        self._seen.add(task.partition)
        return ""

    def _refuse_shortage(self) -> None:
        if why := self._application.shortage(self.count):
            raise LaunchError(why)

    def wait(self) -> list[TaskConnection]:
        """Return all tasks in the order of their partitions, as soon as all have registered.

        Raises:
            LaunchError: Spark has not started them in time, has too few slots, or has ended the job.

        Blocks until then, for the start timeout at most.
        """
        found: dict[int, TaskConnection] = {}
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                for connection in self.listener.arrivals(_LOOK_S):
                    found[connection.task.partition] = connection
                if len(found) == self.count:
                    return [found[partition] for partition in sorted(found)]
                self._look(list(found.values()), deadline)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise

    def _look(self, found: Sequence[TaskConnection], deadline: float) -> None:
        """Raise what makes waiting useless."""
        for connection in found:
            connection.wire.show_life()
            for _ in connection.wire.receive():
                pass
            if connection.wire.is_closed:
                raise LaunchError(f"{connection.name} was lost before all tasks had started: {connection.stderr}")
        self.refuse_end()
        self._refuse_shortage()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Spark has started {len(found)} of {self.count} tasks within {self.timeout_s:g} s (start_timeout, or "
                f"HOROVOD_SPARK_START_TIMEOUT). Do other jobs of the application occupy its slots?"
            )

    def refuse_end(self) -> None:
        """Raise if Spark has ended the job.

        Raises:
            LaunchError: with what Spark says.
        """
        if self.job.has_ended:
            raise LaunchError(f"Spark has ended the tasks of {self._name}: {self.job.failure() or 'no failure'}")

    def close(self, is_well: bool) -> None:
        """Wait for the tasks, or cancel them, and listen no more.

        Args:
            is_well: whether they have been told to end.
        """
        self.job.close(is_well)
        self.listener.close()
