"""A state of variables that a framework keeps, and of plain attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.elastic.state import ObjectState
from horovod.bindings.fingerprints import digest
from horovod.bindings.objects import broadcast_object

__all__ = ["VariablesState", "check_shapes"]

#: Variables, and elements of each, that are compared to find out whether a step changed what ``undo`` does not restore.
#: The smallest ones are biases and scales, which have dense gradients and cost little to read. One more is the last, of
#: a layer that is trained even if others are frozen. The count of an optimizer's steps does not tell it: in a graph it
#: changes while the gradients are still being reduced.
_WATCHED, _FEW = 8, 1024


class VariablesState(ObjectState):
    """State of variables; a subclass lists the variables, reads them and writes them.

    Args:
        **kwargs: attributes of the state.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._saved: tuple[Sequence[Any], Sequence[Any]] = (), ()
        self._captured: tuple[Sequence[Any], Sequence[Any]] | None = None
        self._by_size: Sequence[Any] = ()
        self._watched: tuple[Sequence[Any], str] = (), ""
        self._has_stepped = False
        super().__init__(bcast_object=broadcast_object, get_rank=lambda: context.world().rank, **kwargs)
        self.save()

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _shared(self) -> Sequence[Any]:
        """Return the variables whose values come from rank 0."""
        raise NotImplementedError

    def _equal(self) -> Sequence[Any]:
        """Return the variables of ``_shared`` that have the same values on all ranks after each step."""
        return self._shared()

    def _own(self) -> Sequence[Any]:
        """Return the other variables; their values differ between ranks."""
        return ()

    def _changed_early(self) -> Sequence[Any]:
        """Return the variables that a step may change before it has received the gradients of all ranks."""
        raise NotImplementedError

    def _hold(self, variables: Sequence[Any]) -> Sequence[Any]:
        """Return values that no later step changes."""
        raise NotImplementedError

    def _put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        """Set values from a result of ``_hold``, or from numpy arrays."""
        raise NotImplementedError

    def _arrays(self, variables: Sequence[Any]) -> Sequence[Any]:
        """Return values as numpy arrays."""
        raise NotImplementedError

    def _send(self) -> None:
        """Send rank 0's values of ``_shared`` to all ranks. Collective."""
        raise NotImplementedError

    # -- Horovod's methods -----------------------------------------------------------------------------------------

    def save(self) -> None:
        super().save()
        variables = [*self._shared(), *self._own()]
        self._saved = variables, self._hold(variables)

    def restore(self) -> None:
        """Restore the values of the last ``save``; variables created since keep theirs."""
        super().restore()
        self._put(*self._saved)

    def sync(self) -> None:
        """Send the values and attributes of rank 0 to all ranks. Collective."""
        is_sent, keeps = not self._all_equal, self._sync_present
        if is_sent:
            self._send()
        super().sync()
        if is_sent and not keeps:
            self.save()

    # -- steps -------------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Return a hash of the values that are equal on all ranks, and of the attributes."""
        return digest(self._arrays(self._equal())) + super().digest()

    def capture(self) -> None:
        super().capture()
        variables = self._changed_early()
        self._captured = variables, self._hold(variables)
        early = {id(variable) for variable in variables}
        others = [variable for variable in self._equal() if id(variable) not in early]
        if len(others) != len(self._by_size):  # sorting takes a millisecond
            self._by_size = sorted(others, key=lambda variable: math.prod(variable.shape))
        watched = [*self._by_size[:_WATCHED], *others[-1:]]
        self._watched = watched, self._sampled(watched)

    def undo(self) -> bool:
        """See ``State``.

        Returns:
            False if the step changed other variables than those of ``_changed_early``, or created variables, whose
            earlier values ``capture`` cannot have recorded.
        """
        is_undone = super().undo()
        if self._captured is not None:
            self._put(*self._captured)
            is_undone = is_undone and len(self._changed_early()) <= len(self._captured[0])
        return is_undone and self._is_unchanged()

    def _is_unchanged(self) -> bool:
        watched, sampled = self._watched
        return self._sampled(watched) == sampled

    def _sampled(self, variables: Sequence[Any]) -> str:
        return digest(array.reshape(-1)[:_FEW] for array in self._arrays(variables)) if variables else ""

    def confirm(self) -> None:
        super().confirm()
        self._has_stepped = True

    # -- files -------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """Return values and attributes."""
        return {**super().checkpoint(), "variables": [np.array(value) for value in self._arrays(self._shared())]}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """Load the result of ``checkpoint``.

        Raises:
            ValueError: the checkpoint has other variables.
        """
        variables, found = self._shared(), values["variables"]
        check_shapes(found, [tuple(variable.shape) for variable in variables])
        super().load_checkpoint(values)
        self._put(variables, found)


def check_shapes(found: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Check that the arrays of a checkpoint have these shapes.

    Raises:
        ValueError: they have others, or there are more or fewer.
    """
    if len(found) != len(shapes):
        raise ValueError(f"the checkpoint has {len(found)} arrays, and this state {len(shapes)}")
    for number, (array, shape) in enumerate(zip(found, shapes, strict=True)):
        if np.shape(array) != shape:
            raise ValueError(
                f"array {number} has the shape {np.shape(array)} in the checkpoint, and {shape} in this state"
            )
