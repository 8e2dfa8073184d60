"""Backends that start the ranks of an estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.errors import LaunchError
from horovod.spark.application import Application

__all__ = ["Backend", "SparkBackend"]


class Backend:
    """Interface of a backend that runs a function on all ranks; derive from it to run ranks outside Spark's tasks."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank.

        Args:
            fn: function that cloudpickle can pickle.
            args: its arguments.
            kwargs: its keyword arguments.
            env: environment variables for the ranks.

        Returns:
            Results in rank order.
        """
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of ranks."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise LaunchError if the ranks cannot start; called before the DataFrame is computed."""


class SparkBackend(Backend):
    """Backend that runs ranks in tasks of the active Spark session, through ``horovod.spark.run``.

    Args:
        num_proc: number of ranks; Spark's default number of tasks if omitted.
        env: environment variables for the ranks.
        options: more arguments of ``horovod.spark.run``, such as ``start_timeout``.
    """

    def __init__(self, num_proc: int | None = None, env: dict[str, str] | None = None, **options: Any) -> None:
        self._num_proc = num_proc
        self._env = dict(env or {})
        self._options = options

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """See ``Backend``; ``env`` is added to the backend's own."""
        import horovod.spark

        environment = self._env | (env or {})
        return horovod.spark.run(
            fn, args=tuple(args), kwargs=dict(kwargs or {}), num_proc=self.num_processes(), env=environment or None,
            **self._options,
        )  # fmt: skip

    def check(self) -> None:
        """Raise LaunchError if Spark has too few slots for the ranks."""
        if why := Application().shortage(self.num_processes()):
            raise LaunchError(why)

    def num_processes(self) -> int:
        return self._num_proc or Application().parallelism
