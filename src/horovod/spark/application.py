"""The Spark application of this process: its slots, and the Spark job whose tasks hold the ranks."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from horovod.bindings.misuse import not_installed

__all__ = ["Application", "TaskJob"]

#: Seconds to wait for executors if their number is unknown; the same as Spark's default.
_SETTLE_S = 30.0
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,")
_ENDED_S = 10.0
#: Interval in seconds between attempts to cancel: Spark ignores one before it knows the job.
_CANCEL_S = 0.5


class Application:
    """The active Spark application, with the queries that ranks need.

    Raises:
        ModuleNotFoundError: PySpark is not installed.
        RuntimeError: there is no active SparkContext in this process, as with Spark Connect.
    """

    def __init__(self) -> None:
        try:
            from pyspark import SparkContext
        except ModuleNotFoundError as error:
            raise not_installed(error, "pyspark", "spark") from None
        context = SparkContext._active_spark_context
        if context is None:
            from pyspark.sql.utils import is_remote

            if is_remote():
                raise RuntimeError(
                    "horovod.spark needs a SparkContext in this process, and Spark Connect has none: start the script "
                    "with spark-submit, or with SparkSession.builder.master(...), on the cluster"
                )
            raise RuntimeError(
                "there is no active SparkContext: create one before, such as SparkSession.builder.getOrCreate()"
            )
        self.context: Any = context
        self._began = time.monotonic()

    @property
    def parallelism(self) -> int:
        """Spark's default number of tasks: its cores, so divided by the cores of a task, unless the user has set it."""
        conf = self.context.getConf()
        cpus = 1 if conf.contains("spark.default.parallelism") else int(conf.get("spark.task.cpus", "1"))
        return max(1, int(self.context.defaultParallelism) // cpus)

    @property
    def slots(self) -> int:
        """Number of tasks that can run concurrently on the present executors."""
        java = self.context._jsc.sc()
        return int(java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile()))

    @property
    def _executors(self) -> int:
        return int(self.context._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is listed, too

    def shortage(self, size: int) -> str:
        """Return the reason why ``size`` tasks can never run concurrently; empty while they still may."""
        slots = self.slots
        if slots >= size or not self._is_settled():
            return ""
        cpus = self.context.getConf().get("spark.task.cpus", "1")
        executors = f", {self._executors} executors" if self._executors else ""
        return (
            f"num_proc={size}, and the Spark application has {slots} slots ({self.context.master}{executors}, "
            f"spark.task.cpus={cpus}): one rank runs in each. Lower num_proc, or start more executors"
        )

    def _is_settled(self) -> bool:
        """Whether all expected executors have registered."""
        conf, master = self.context.getConf(), self.context.master
        if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            return False
        if found := _LOCAL_CLUSTER.match(master):
            wanted = int(found[1])
        elif master.startswith("local"):
            wanted = 0
        else:
            wanted = int(conf.get("spark.executor.instances", "0"))
            if not wanted:
                return time.monotonic() - self._began > _SETTLE_S
        return self._executors >= wanted


class TaskJob:
    """A Spark job whose tasks run until the driver ends them.

    Args:
        application: the application that runs it.
        count: number of tasks.
        task: picklable function of each task, with the signature of ``mapPartitionsWithIndex``.
        name: name of the job in Spark's web pages.
    """

    def __init__(self, application: Application, count: int, task: Callable[..., Any], name: str) -> None:
        from pyspark import InheritableThread

        self._context = application.context
        self._tag = f"horovod-{uuid.uuid4()}"  # a group would take the job from the caller's own one
        self._error: BaseException | None = None
        self._thread: threading.Thread = InheritableThread(
            target=self._run, args=(count, task, name), name="horovod-spark", daemon=True
        )
        self._thread.start()

    def _run(self, count: int, task: Callable[..., Any], name: str) -> None:
        try:
            self._context.addJobTag(self._tag)
            self._context.setInterruptOnCancel(True)
            self._context.setJobDescription(name)
            self._context.parallelize(range(count), count).mapPartitionsWithIndex(task).collect()
        except BaseException as error:
            self._error = error

    @property
    def has_ended(self) -> bool:
        """Whether all tasks have ended."""
        return not self._thread.is_alive()

    def failure(self) -> str:
        """Return the reason why Spark aborted the job; empty if the job runs or succeeded."""
        if self._error is None:
            return ""
        text = str(getattr(self._error, "java_exception", "") or self._error)
        return text.partition("\nDriver stacktrace:")[0].strip()

    def close(self, is_well: bool) -> None:
        """Wait for the tasks, or cancel them. Blocks for ten seconds at most.

        Args:
            is_well: whether the tasks were asked to end, so that they need not be cancelled.
        """
        if is_well:
            self._thread.join(_ENDED_S)
        deadline = time.monotonic() + _ENDED_S
        while not self.has_ended and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # a Py4J error: the application has ended meanwhile
                self._context.cancelJobsWithTag(self._tag)
            self._thread.join(_CANCEL_S)
