"""Collectives on numbers, arrays, tensors and variables, through the backend of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from horovod._keras.backends import Backend
from horovod.bindings.agreement import agree_on_count
from horovod.bindings.collectives import Collectives
from horovod.bindings.docstrings import explained_like
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import Reduction, resolve_op
from horovod.core.requests import ReduceOp

__all__ = ["Values"]

_ROWS = "an array, a tensor or a variable; same shape and dtype on every rank."
_VALUE = f"a number, {_ROWS}"


class Values:
    """The collectives that a module for Keras exports; ``tensor`` converts a value to a tensor of the backend."""

    def __init__(self, backend: Backend, tensor: Callable[[Any], Any]) -> None:
        self._backend = backend
        self._tensor = tensor

    @explained_like(Collectives.allreduce, value=_VALUE)
    def allreduce(
        self,
        value: Any,
        name: str | None = None,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: int | None = None,
        compression: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Combine a value over all ranks, element by element.

        Returns:
            A tensor of the backend.
        """
        if average is not None and op is not None:
            resolve_op(op, average)
        how = resolve_op(op, None) if average is None else ReduceOp.AVERAGE if average else ReduceOp.SUM
        reduction = Reduction(how, prescale_factor, postscale_factor, process_set)
        compression = compression or self._backend.compression.none
        return self._backend.hvd.allreduce(
            self._tensor(value), name=name, compression=compression, **reduction.keywords
        )

    @explained_like(
        Collectives.allgather, value="an array, a tensor or a variable; the first dimension may differ between ranks."
    )
    def allgather(self, value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
        """Concatenate every rank's value along the first dimension, in rank order.

        Returns:
            A tensor of the backend.
        """
        return self._backend.hvd.allgather(self._tensor(value), name=name, process_set=process_set)

    @explained_like(Collectives.broadcast, value=_VALUE)
    def broadcast(
        self, value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Return the root's value.

        Returns:
            A tensor of the backend.
        """
        return self._backend.broadcast(self._tensor(value), root_rank, name, process_set)

    @explained_like(Collectives.reducescatter, value=_ROWS)
    def reducescatter(
        self,
        value: Any,
        name: str | None = None,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Combine a value over all ranks and return this rank's rows of the result.

        Returns:
            A tensor of the backend; if the rows do not divide evenly, the first ranks get one more.
        """
        how = resolve_op(op, None)
        return self._backend.hvd.reducescatter(self._tensor(value), name=name, op=how, process_set=process_set)

    def broadcast_variables(
        self, variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
    ) -> None:
        """Set variables on all ranks to the root's values.

        Args:
            variables: such as ``model.weights + optimizer.variables``; same number and order on every rank.
            root_rank: rank that sends its values.
            process_set: ranks that take part; this rank must be one of them.

        Raises:
            RequestError: ``variables`` is no list, but a model or one variable.
            MismatchError: the ranks' variables differ; on every rank.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
            NotInitializedError: ``init()`` was not called.

        Blocks until all ranks called.
        """
        if not isinstance(variables, Iterable) or hasattr(variables, "assign"):
            raise wrong_argument(
                "broadcast_variables takes a list of variables, such as model.weights. "
                f"Received: {type_name(variables)}"
            )
        backend, targets = self._backend, list(variables)
        agree_on_count("broadcast_variables", [variable.name for variable in targets], process_set)
        for number, variable in enumerate(targets):
            # Match by index: Keras' names contain the number of layers that this rank has made before.
            value = self._tensor(variable)
            variable.assign(backend.broadcast(value, root_rank, f"broadcast_variables.{number}", process_set))

    def broadcast_global_variables(self, root_rank: int) -> None:
        """Raise: Keras keeps no list of all variables.

        Args:
            root_rank: rank that would send its values.

        Raises:
            RequestError: always; it names the function to call instead.
        """
        raise wrong_argument(
            "broadcast_global_variables() needs the graphs and sessions of TensorFlow 1. Add "
            f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}) to the callbacks of fit(), or call "
            f"hvd.broadcast_variables(model.weights + model.optimizer.variables, root_rank={root_rank})"
        )
