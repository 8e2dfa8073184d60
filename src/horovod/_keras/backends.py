"""Interface of a Keras backend: it connects tensors with the binding of their framework."""

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
    """Parameters of one reduction.

    Attributes:
        name: key of the match.
        compression: compressor of the sent tensors.
        sparse_as_dense: whether sparse gradients are sent as dense ones.
        remedy: the call to recommend if the ranks' variables differ in the first step.
    """

    name: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    remedy: str = ""


class Backend:
    """Interface of a Keras backend, with default implementations of some methods.

    Attributes:
        name: name of the backend, as in KERAS_BACKEND.
        hvd: the module with the collectives for training scripts.
        comm: the collectives of its framework.
        compression: ``Compression`` of its framework.
        generators: random generators of its framework that are no variables.
    """

    name: str
    hvd: Any
    comm: Collectives
    compression: Any
    generators: Sequence[Generator] = ()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], order: Order) -> list[Any]:
        """Reduce gradients as one operation: in a graph, in jit, or eagerly.

        Args:
            gradients: tensors; ``None`` stays ``None`` unless another rank has that gradient.
            variables: variables of the gradients.
            order: parameters of the reduction.
        """
        raise NotImplementedError

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which variables can be created and read while a step is traced."""
        return nullcontext()

    def scale(self, gradient: Any, factor: Any) -> Any:
        """Multiply a gradient, which may be sparse, by a number or a float32 tensor."""
        return gradient * factor

    def members(self, process_set: ProcessSet) -> Any:
        """Return the number of a set's ranks; a tensor if a compiled step may be reused after a membership change."""
        return process_set.size() or 1

    def cond(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return ``then()`` if ``condition`` is true, else ``otherwise()``; the condition may be a traced tensor."""
        raise NotImplementedError

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
        """Return whether a failed step may have changed any variable.

        Args:
            is_known: whether a step was done before, so that its compilation mode is known.
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
        """Broadcast and compare variables before the first gradients are combined.

        Args:
            variables: variables that are trained.
            act: runs the pending work of callbacks; called while Python can access the values.
            compare: compares the variables over all ranks; takes a function that returns them as numpy arrays.

        Returns:
            False if the variables have no values yet and the step will be traced again; else True.
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
