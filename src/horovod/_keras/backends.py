"""Interface of a Keras backend: it connects tensors with the binding of their framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from horovod.bindings.collectives import Collectives
from horovod.bindings.elastic.generators import Generator
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.process_sets import ProcessSet

__all__ = ["Backend", "Compare", "Order"]

Compare = Callable[[Callable[[], Sequence[Any]]], None]


@dataclass(frozen=True)
class Order(ReduceSettings):
    """Parameters of one reduction."""

    compression: Any = None
    name: str = ""  # key of the match
    remedy: str = ""  # the call to recommend if the ranks' variables differ in the first step


class Backend:
    """Interface of a Keras backend, with default implementations of some methods."""

    name: str  # name of the backend, as in KERAS_BACKEND
    hvd: Any  # the module with the collectives for training scripts
    comm: Collectives  # the collectives of its framework
    compression: Any
    generators: Sequence[Generator] = ()  # random generators of its framework that are not variables

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], order: Order) -> list[Any]:
        """Reduce gradients as one operation: in a graph, in jit, or eagerly.

        A ``None`` stays ``None`` unless another rank has that gradient.
        """
        raise NotImplementedError

    def together(self, gradients: Sequence[Any]) -> list[Any]:
        """Return all combined gradients of a step so that none can be applied before the last one has arrived."""
        return list(gradients)

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which variables can be created and read while a step is traced."""
        return nullcontext()

    def scale(self, gradient: Any, factor: Any) -> Any:
        """Multiply a gradient, which may be sparse, by a number or a float32 tensor."""
        return gradient * factor

    def members(self, process_set: ProcessSet) -> Any:
        """Return the number of a set's ranks; a tensor if a compiled step may be reused after a membership change."""
        return process_set.size() or 1

    def in_last_pass(self, iterations: Any, steps: int, combine: Callable[[], Any], own: Any) -> Any:
        """Return ``combine()`` in the last of ``steps`` accumulated passes, in which Keras clips; else ``own``."""
        return combine()

    def typed(self) -> AbstractContextManager[None]:
        """Return a context that raises our original error instead of the framework's converted one."""
        return nullcontext()

    def wait(self, values: Any) -> None:
        """Wait until all tensors of a nest are computed, so that an error of their step is raised here."""

    def hold(self, variables: Sequence[Any]) -> list[Any]:
        """Return values of variables that no later step changes; without a copy if possible."""
        raise NotImplementedError

    def put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        """Set values that ``hold`` returned."""
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value)

    def array(self, variable: Any) -> Any:
        """Return the value of a variable as a numpy array, which may share its memory."""
        raise NotImplementedError

    def changes_all(self, is_known: bool) -> bool:
        """Return whether a failed step may have changed any variable. ``is_known``: a step was done before, so that its
        compilation mode is known.
        """
        return False

    def refuses_xla(self) -> bool:
        """Return whether XLA cannot compile a step that contains a collective."""
        return False

    def shield(self, optimizer: Any) -> None:
        """Keep the framework's compiler from tracing into a distributed optimizer's ``apply``."""

    def reraise(self, error: BaseException) -> None:
        """Raise the original error of a collective if the framework converted it into ``error``; else return."""

    def first_step(self, variables: Sequence[Any], act: Callable[[], None], compare: Compare) -> bool:
        """Broadcast and compare the trained variables before the first gradients are combined.

        ``act`` runs the pending work of callbacks; it is called while Python can access the values. ``compare`` takes a
        function that returns them as numpy arrays. Return False if the variables have no values yet and the step will
        be traced again; else True.
        """
        return True

    def broadcast(self, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        """Return the root's tensor."""
        return self.hvd.broadcast(tensor, root_rank, name=name, process_set=process_set)
