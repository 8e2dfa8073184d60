"""The backend of Keras, as this package sees it: the place where tensors meet the binding of their framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from horovod.bindings.collectives import Collectives
from horovod.bindings.elastic.generators import Generator
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.reductions import Reduction
from horovod.core.requests import ReduceOp

__all__ = ["Backend", "Compare", "Order"]

Compare = Callable[[Callable[[], Sequence[Any]]], None]


@dataclass(frozen=True)
class Order(Reduction):
    """How some tensors are to be reduced.

    Attributes:
        name: key of the match.
        compression: what goes over the wire.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        remedy: what to call if the ranks' variables differ in the first step.
    """

    name: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    remedy: str = ""


class Backend:
    """The interface of a backend of Keras, with what most of them do.

    Attributes:
        name: as in KERAS_BACKEND.
        hvd: the module with the collectives of a training script.
        comm: the collectives of its framework.
        compression: its ``Compression``.
        generators: random generators of its framework that are no variables.
    """

    name: str
    hvd: Any
    comm: Collectives
    compression: Any
    generators: Sequence[Generator] = ()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], order: Order) -> list[Any]:
        """Reduce gradients as one operation, where they are: in a graph, in jit, or at once.

        Args:
            gradients: tensors; ``None`` is left as it is unless another rank has that gradient.
            variables: which each of them belongs to.
            order: how.
        """
        raise NotImplementedError

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which variables can be made, and read, while a step is traced."""
        return nullcontext()

    def scale(self, gradient: Any, factor: Any) -> Any:
        """Return a gradient, which may be sparse, times a number, or a tensor of float32."""
        return gradient * factor

    def members(self, process_set: ProcessSet) -> Any:
        """Return how many ranks a set has, also where a compiled step outlives its members."""
        return process_set.size() or 1

    def cond(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return ``then()`` if a condition holds, else ``otherwise()``; the condition may be known only at run time."""
        raise NotImplementedError

    def typed(self) -> AbstractContextManager[None]:
        """Return a context that raises our own error where the framework makes another one of it."""
        return nullcontext()

    def wait(self, values: Any) -> None:
        """Wait until tensors, in any nest, are computed, so that an error of their step is raised."""

    def hold(self, variables: Sequence[Any]) -> list[Any]:
        """Return the values of variables, which no later step changes; without a copy where possible."""
        raise NotImplementedError

    def put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        """Set values that ``hold`` returned."""
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value)

    def array(self, variable: Any) -> Any:
        """Return the value of a variable as an array of numpy, which may share its memory."""
        raise NotImplementedError

    def changes_all(self, is_known: bool) -> bool:
        """Return whether a step that fails may have changed any variable.

        Args:
            is_known: whether a step was done before, so that it is known how it is compiled.
        """
        return False

    def refuses_xla(self) -> bool:
        """Return whether a step that XLA compiles cannot hold a collective."""
        return False

    def shield(self, optimizer: Any) -> None:
        """Have a distributed optimizer's ``apply`` called as it is by what compiles steps."""

    def reraise(self, error: BaseException) -> None:
        """Raise what a collective raised, where ``error`` is what the framework made of it; else return."""

    def first_step(self, variables: Sequence[Any], act: Callable[[], None], compare: Compare) -> bool:
        """Do before the first gradients are combined what needs the variables' values.

        Args:
            variables: that are trained.
            act: what a callback has left to do; called where the values can be reached from Python.
            compare: compares them over all ranks; takes a function that returns them as numpy arrays.

        Returns:
            Whether that was done; it was not where the variables have no values yet, and the step is traced again.
        """
        raise NotImplementedError

    def allreduce(self, tensor: Any, order: Order) -> Any:
        """Reduce one tensor."""
        return self.hvd.allreduce(tensor, name=order.name or None, compression=order.compression, **order.keywords)

    def allgather(self, tensor: Any, name: str | None, process_set: ProcessSet) -> Any:
        """Concatenate every rank's tensor."""
        return self.hvd.allgather(tensor, name=name, process_set=process_set)

    def broadcast(self, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        """Return the root's tensor."""
        return self.hvd.broadcast(tensor, root_rank, name=name, process_set=process_set)

    def reducescatter(self, tensor: Any, name: str | None, op: ReduceOp, process_set: ProcessSet) -> Any:
        """Reduce one tensor and return this rank's rows."""
        return self.hvd.reducescatter(tensor, name=name, op=op, process_set=process_set)
