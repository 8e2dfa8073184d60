"""Common arguments of ``horovod.spark.run`` and ``run_elastic``."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TextIO

from horovod.launch import task
from horovod.launch.assemble import environment, interface_names, interface_settings
from horovod.launch.call import sink_of
from horovod.launch.plan import SCOPE_VARIABLE, Display, LaunchPlan
from horovod.spark.relay import Registration

__all__ = ["JobOptions"]


class JobOptions:
    """The user's arguments, checked; ``run`` describes them.

    Args:
        name: name of the called function, for messages.
        env: additional environment variables for the ranks.
        stdout: text stream for the output of the ranks.
        stderr: text stream for the standard error of the ranks.
        verbose: more than 0 prints the started processes.
        nics: network interfaces present on all hosts.
        timestamps: whether each line of output begins with date and time.
        executable: Python interpreter of the ranks; that of their tasks when None.

    Raises:
        ValueError: ``env`` does not map names to texts, ``nics`` are not names, or a stream cannot be written.
    """

    def __init__(
        self,
        name: str,
        env: Mapping[str, str] | None,
        stdout: TextIO | None,
        stderr: TextIO | None,
        verbose: int,
        nics: str | Sequence[str] | None,
        timestamps: bool,
        executable: str | None = None,
    ) -> None:
        variables = environment(env, "env")
        for stream, what in ((stdout, "stdout"), (stderr, "stderr")):
            if stream is not None and not hasattr(stream, "write"):
                raise ValueError(f"{what} must be a text stream, such as open('log', 'w'); received {stream!r}")
        self.name = name
        self.sinks = sink_of(stdout or sys.stdout, sys.__stdout__), sink_of(stderr or sys.stderr, sys.__stderr__)
        self.interfaces = interface_names(nics, "nics")
        self.environ = {**interface_settings(self.interfaces), **variables}
        self._is_verbose, self._timestamps, self._executable = verbose > 0, timestamps, executable or ""

    def say(self, line: str) -> None:
        """Print a line of our own if the user wants them."""
        if self._is_verbose:
            self.sinks[1].put(f"{self.name}: {line}\n".encode())

    def plan(self, environ: Mapping[str, str], first: Registration, ranks: Sequence[Mapping[str, str]]) -> LaunchPlan:
        """Return the plan of a job; see ``own_plan``.

        Args:
            environ: environment variables common to all ranks.
            first: the task of the first rank.
            ranks: environment variables of each rank; empty for an elastic job.
        """
        # Spark divides the cores of a host among its tasks.
        threads = {"OMP_NUM_THREADS": first.threads} if first.threads else {}
        return LaunchPlan(
            command=(self._executable, "-m", task.__name__),
            hostname=first.nodename,
            environ={"PYTHONUNBUFFERED": "1", **threads, **environ},
            ranks=tuple(ranks),
            timestamps=self._timestamps,
            counts=(1,) * len(ranks),
            display=Display(launcher=self.name, place="Spark task"),
        )

    def own_plan(self, plan: LaunchPlan, place: Registration) -> LaunchPlan:
        """Return the plan for one task.

        Args:
            plan: plan of the job, or the task's part of it.
            place: the task.
        """
        environ = {**plan.environ, SCOPE_VARIABLE: secrets.token_hex(8)}
        return replace(plan, command=(self._executable or place.python, *plan.command[1:]), environ=environ)
