"""The actor of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from horovod import context
from horovod.bindings.hosted import call_guarded, call_hosted, end_of_call
from horovod.ray import ray_logger
from horovod.world import check_meetings

__all__ = ["BaseHorovodWorker"]


class BaseHorovodWorker:
    """Methods of an actor of ``RayExecutor``; executors turn this class into an actor.

    Args:
        world_rank: accepted and ignored: the executor numbers its workers by their nodes.
        world_size: accepted and ignored.

    Attributes:
        executable: object of ``executable_cls`` of ``RayExecutor.start``; None without one.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        pass

    def node_id(self) -> str:
        """Return the id of the node of this actor."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """Return the id of the node of this actor, under Horovod's name."""
        return self.node_id()

    def place(self) -> tuple[str, str, int, list[str]]:
        """Return the id of the node, its address, the process id, and the GPUs that Ray gave to this actor."""
        return self.node_id(), str(ray.util.get_node_ip_address()), os.getpid(), self.get_gpu_ids()

    def get_gpu_ids(self) -> list[str]:
        """Return the ids of the GPUs that Ray gave to this actor."""
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set variables in the environment of this process.

        Args:
            env_vars: values by name; they are converted to strings.
        """
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return the environment of this process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the object for functions of ``execute``.

        Args:
            executable_cls: its class; None for no object.
            executable_args: arguments of the class.
            executable_kwargs: keyword arguments of the class.
        """
        if executable_cls is not None:
            self.executable = call_guarded(executable_cls, executable_args or (), executable_kwargs or {})

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the executable.

        Args:
            func: the function.

        Returns:
            Its result.

        Raises:
            Exception: as the function raised it; this process has left its job first, so that no rank waits for it.
        """
        return self.call((func, (self.executable,), {}), None)[0]

    def call(self, call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]], queue: Any) -> tuple[Any, bool]:
        """Call a function as a rank; see ``execute``.

        Args:
            call: function, arguments and keyword arguments.
            queue: queue for the dictionaries of ``ray_logger.log``; None drops them.

        Returns:
            Its result, and True; Ray stores them as two objects, and the second one is small.
        """
        func, args, kwargs = call
        check_meetings(_end_if_canceled)
        ray_logger.configure(queue)
        try:
            return call_guarded(func, args, kwargs), True
        finally:
            check_meetings()
            ray_logger.configure(None)

    def call_executable(self, func: Callable[[Any], Any], queue: Any = None) -> tuple[Any, bool]:
        """Call a function with the executable; see ``call``.

        Args:
            func: the function.
            queue: as for ``call``.
        """
        return self.call((func, (self.executable,), {}), queue)

    def call_elastic(
        self,
        variables: Mapping[str, str],
        executable: tuple[Any, Any, Any] | None,
        call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]],
        queue: Any,
    ) -> Any:
        """Run one call as a process of an elastic job.

        Args:
            variables: the process's environment variables.
            executable: as for ``start_executable``, if the function's first argument is an executable.
            call: as for ``call``.
            queue: as for ``call``.
        """
        func, args, kwargs = call

        def make_call() -> Any:
            try:
                if executable is None:
                    return func(*args, **kwargs)
                self.start_executable(*executable)
                return func(self.executable, *args, **kwargs)
            except SystemExit as end:
                if end.code:
                    raise
                return None  # this rank has left the job

        ray_logger.configure(queue)
        try:
            return call_hosted(variables, make_call, (), {})
        finally:
            ray_logger.configure(None)

    def reset(self) -> None:
        """Leave the job; ``hvd.init()`` may follow."""
        context.shutdown()


def _end_if_canceled() -> None:
    # Ray before 2.53 cannot tell.
    is_canceled = getattr(ray.get_runtime_context(), "is_canceled", None)
    if is_canceled is not None and is_canceled():
        end_of_call()
