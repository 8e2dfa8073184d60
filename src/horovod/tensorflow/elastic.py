"""Elastic training with TensorFlow: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings.elastic import common_names
from horovod.bindings.elastic.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.step import decorators
from horovod.bindings.elastic.variables import VariablesState
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.tensorflow.failures import typed_errors
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.held import array_of, changes_all, changes_early, hold, put
from horovod.tensorflow.shards import shard

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run", "shard", "step"]  # noqa: F405
__all__ += common_names.__all__

run, step = decorators(typed_errors)


class TensorFlowState(VariablesState):
    """State of TensorFlow variables and other values.

    A commit keeps the present values without a copy: the next step writes to other memory.

    Args:
        variables: variables to save and to synchronize; with a session all global variables by default.
        session: session of TensorFlow 1; None for eager execution.
        **kwargs: attributes of the state, such as ``epoch=0, batch=0``.

    Raises:
        RequestError: no variables were given, and there is no session; or one of them is no variable.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None and session is None:
            raise wrong_argument(
                "TensorFlowState needs variables, such as model.variables + optimizer.variables; only with a session "
                "of TensorFlow 1 all of them are known"
            )
        self.session = session
        with session.graph.as_default() if session else tf.init_scope():
            found = tf.compat.v1.global_variables() if variables is None else variables
            self.variables = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in found]
            if other := [v for v in self.variables if not isinstance(v, tf.Variable)]:
                raise wrong_argument(f"TensorFlowState takes variables. Received: {type_name(other[0])}")
            self._broadcast = broadcast_variables(self.variables, 0) if session else None
        super().__init__(**kwargs)

    def _shared(self) -> Sequence[Any]:
        return self.variables

    def _changed_early(self) -> Sequence[Any]:
        all_change = self.session or changes_all(self._has_stepped)
        return self.variables if all_change else changes_early(self.variables)

    def _hold(self, variables: Sequence[Any]) -> Sequence[Any]:
        return self._arrays(variables) if self.session else hold(variables)

    def _put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        if not self.session:
            put(variables, held)
            return
        for variable, value in zip(variables, held, strict=True):
            variable.load(value, self.session)

    def _arrays(self, variables: Sequence[Any]) -> Sequence[Any]:
        return self.session.run(list(variables)) if self.session else [array_of(variable) for variable in variables]

    def _send(self) -> None:
        if self.session:
            with typed_errors():
                self.session.run(self._broadcast)
        else:
            broadcast_variables(self.variables, 0)


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":
        # Import tf.keras only on demand, as in horovod.tensorflow.
        from horovod.tensorflow.keras.elastic import KerasState

        globals()[name] = made = type(name, (KerasState,), {"__module__": __name__, "__doc__": KerasState.__doc__})
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
