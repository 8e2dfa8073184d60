"""Combines the gradients of one optimizer over all ranks; knows no backend and no class of optimizers."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod._keras.backends import Backend, Order
from horovod._keras.settings import Settings
from horovod.bindings.fingerprints import compare_once
from horovod.bindings.objects import broadcast_object
from horovod.bindings.process_sets import key_of
from horovod.bindings.runtime import comm
from horovod.bindings.sites import Site, user_site
from horovod.core.requests import ReduceOp
from horovod.errors import MismatchError
from horovod.splits import split_evenly

__all__ = ["REMEDY", "GradientReduction"]

#: Numbers for optimizers in order of creation.
_created = itertools.count(1)
#: For each engine and process set, the numbers for optimizers in order of first use: init() counts may differ between
#: ranks, and so may the sets that a rank belongs to.
_numbers: weakref.WeakKeyDictionary[Any, defaultdict[tuple[int, ...], Iterator[int]]] = weakref.WeakKeyDictionary()

_SAME_NUMBER = (
    "give every rank the same number of batches: pass steps_per_epoch= (the smallest of all ranks), drop the last "
    "batches, or repeat the data set; MetricAverageCallback before EarlyStopping has all ranks stop together"
)
REMEDY = (
    "model.fit() with hvd.callbacks.BroadcastGlobalVariablesCallback(0) among its callbacks, or in a loop of your own "
    "hvd.broadcast_variables(model.weights, root_rank=0)"
)


class GradientReduction:
    """See the module.

    Attributes:
        settings: the argument.
        backend: the argument.
        number: number of this distributed optimizer in the script, from 1.
        before_first_step: functions of callbacks to call once the variables exist, before their first change.
    """

    def __init__(self, settings: Settings, backend: Backend, key: Callable[[Any], Any]) -> None:
        self.settings = settings
        self.backend = backend
        self._key = key
        self.before_first_step: list[Callable[[], None]] = []
        self.number = next(_created)
        self._local: list[Any] = []
        self._name = self._first_name = ""
        self._compared = False

    @property
    def name(self) -> str:
        """Name prefix of its operations; numbered at first use, because only trained optimizers count."""
        if not self._name and context.is_elastic():
            # Number optimizers by creation: a new rank has not trained the optimizers that the others have.
            self._name = f"DistributedOptimizer.{self.number}"
        elif not self._name:
            engine = context.engine()
            process_set = self.settings.process_set
            numbers = _numbers.setdefault(engine, defaultdict(lambda: itertools.count(1)))
            number = next(numbers[key_of(process_set)])
            meeting = engine.link.generation.number
            # Use only characters that TensorFlow allows in node names.
            self._name = "DistributedOptimizer" + (f".{number}" if number > 1 else "")
            # A node's name must not depend on the nodes of other sets, which only some ranks have in their graph.
            self._name += f".of_set_{process_set.process_set_id}" if process_set.process_set_id else ""
            self._name += f".after_{meeting - 1}_shutdowns" if meeting > 1 else ""
        return self._name

    # -- local variables -----------------------------------------------------------------------------------------

    def register_local(self, variable: Any) -> None:
        """Keep a variable's gradient local from now on."""
        self._local.append(variable)

    def _is_local(self, variable: Any) -> bool:
        return any(self._key(variable) == self._key(local) for local in self._local)

    # -- gradients -----------------------------------------------------------------------------------------------

    def prepare(self, variables: Sequence[Any]) -> None:
        """Run pending callback functions before the first gradients, and check that all ranks train the same model."""
        if self._compared or not self.settings.active:
            return
        self._compared = True
        shared = [variable for variable in variables if not self._is_local(variable)]
        self._compared = self.backend.first_step(shared, self._act, lambda arrays: self._compare(shared, arrays))

    def _act(self) -> None:
        while self.before_first_step:
            self.before_first_step.pop(0)()

    def _compare(self, variables: Sequence[Any], arrays: Callable[[], Sequence[Any]]) -> None:
        names = [str(getattr(variable, "path", None) or variable.name) for variable in variables]
        compare_once(self.name, names, arrays, REMEDY, self.settings.process_set)

    def combine(
        self, gradients: Sequence[Any], variables: Sequence[Any], numbers: Sequence[int], op: ReduceOp | None = None
    ) -> list[Any]:
        """Return the gradients combined over all ranks; ``None`` if a variable has none.

        ``numbers`` are the variables' indices in the optimizer, the same on every rank; ``op`` replaces its reduction
        and factors.
        """
        settings, found = self.settings, list(gradients)
        factor = settings.factor if op is None else 1.0
        local = [index for index, variable in enumerate(variables) if self._is_local(variable)]
        shared = sorted(set(range(len(found))).difference(local))
        if settings.active:
            is_scaled = bool(local) and settings.local_is_scaled
            self._scale(found, local, factor / self.backend.members(settings.process_set) if is_scaled else factor)
            for members in self._groups(shared, variables):
                order = self._order(f"{numbers[members[0]]}-{numbers[members[-1]]}", op, factor)
                parts = [found[index] for index in members], [variables[index] for index in members]
                for index, gradient in zip(members, self.backend.reduce(*parts, order), strict=True):
                    found[index] = gradient
            found = self.backend.together(found)
        else:
            self._scale(found, [*local, *shared], factor)
        return found

    def _scale(self, gradients: list[Any], which: Sequence[int], factor: Any) -> None:
        for index in which:
            if not (isinstance(factor, float) and factor == 1.0) and gradients[index] is not None:
                gradients[index] = self.backend.scale(gradients[index], factor)

    def _order(self, which: str, op: ReduceOp | None, factor: float) -> Order:
        settings = self.settings
        if op is not None:
            name, none = f"{self.name}.values.{which}", self.backend.compression.none
            return Order(op, process_set=settings.process_set, name=name, compression=none)
        self._first_name = self._first_name or f"{self.name}.gradients.{which}"
        return Order(
            settings.op, settings.prescale, settings.postscale * factor, settings.process_set, settings.compression,
            settings.sparse_as_dense, f"{self.name}.gradients.{which}", REMEDY,
        )  # fmt: skip

    def _groups(self, which: Sequence[int], variables: Sequence[Any]) -> list[list[int]]:
        """Return groups of indices of gradients that are reduced together."""
        groups = self.settings.groups
        if not which:
            return []
        if isinstance(groups, int):
            return [[which[place] for place in run] for run in split_evenly(len(which), groups or 1)]
        place = {self._key(variables[index]): index for index in which}
        found = [[place.pop(self._key(v)) for v in group if self._key(v) in place] for group in groups]
        return [members for members in (*found, sorted(place.values())) if members]

    # -- the end -------------------------------------------------------------------------------------------------

    def learn_name(self) -> None:
        """Learn rank 0's name for ``agree_on_end``: this rank may have joined after the last gradients. Collective."""
        found = broadcast_object(self._first_name, 0, "elastic.gradients")
        self._first_name = self._first_name or found

    def agree_on_end(self, what: str) -> None:
        """Check that no other rank is still combining gradients, at the end of ``what``, such as "fit()".

        This rank submits a mismatching tensor under a name of its gradients. If another rank is still training, every
        rank gets an error instead of waiting for the others.

        Raises:
            MismatchError: another rank is still training.
        """
        if not (self._first_name and context.is_initialized() and self.settings.active):
            return
        name, process_set = self._first_name, self.settings.process_set
        site = user_site()
        # The error shows this text as the place to ranks that are still training, also inside compiled steps.
        told = f"the end of {what} there ({_SAME_NUMBER}), {site.file}"
        as_told = Site(told, site.line, site.function).stand_in()
        try:
            as_told(lambda: comm.allreduce(np.zeros((), np.uint8), name=name, op=ReduceOp.SUM, process_set=process_set))
        except MismatchError as error:
            raise MismatchError(
                f"{what} has ended on this rank and not on others, which take more steps: ranks with different numbers "
                "of batches would average gradients of different steps, and wait for ever at the end. "
                f"G{_SAME_NUMBER[1:]}. {error}"
            ) from error
