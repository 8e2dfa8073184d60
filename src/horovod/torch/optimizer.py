"""``DistributedOptimizer``: a torch optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod import context
from horovod.bindings.gradients.parameters import (
    check_compression,
    check_groups,
    check_names,
    check_passes,
    find_duplicates,
)
from horovod.bindings.gradients.reducer import Reducer
from horovod.bindings.gradients.settings import Settings
from horovod.bindings.misuse import out_of_turn, warn_deprecated, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp
from horovod.torch.adasum import AdasumMembers
from horovod.torch.compiling import keep_out_of_graphs
from horovod.torch.compression import Compression, Compressor
from horovod.torch.gradient_adapter import TorchGradients
from horovod.torch.parameters import Named, check_optimizer, parameters_of, trained
from horovod.torch.runtime import comm

__all__ = ["DistributedOptimizer"]

_gradients = TorchGradients()


class _Members:
    """What a distributed optimizer has besides its own class; see ``DistributedOptimizer``."""

    # A copy of an optimizer (copy.deepcopy, pickle) has only these, and is a plain optimizer again.
    _reducer: Reducer | None = None
    _synchronized = False
    _should_synchronize = True

    param_groups: list[dict[str, Any]]
    backward_passes_per_step: int
    op: ReduceOp
    process_set: ProcessSet
    _groups: list[list[torch.Tensor]] | None
    _parameter_names: dict[torch.Tensor, str]

    def _set_up(self, settings: Settings, passes: int, named: Named, groups: list[list[torch.Tensor]] | None) -> None:
        self.op, self.process_set = settings.op, settings.process_set
        self.backward_passes_per_step = passes
        self._groups = groups
        self._parameter_names = {parameter: name for name, parameter in named}
        self._synchronized, self._should_synchronize = False, True
        bucket_bytes = context.config().bucket_bytes
        self._reducer = Reducer(self._trained(), settings, passes, groups or (), bucket_bytes, _gradients)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        return trained(self.param_groups, self._parameter_names)

    def synchronize(self) -> None:
        """Wait until every gradient is that of all ranks.

        Called by ``step()``. Call it yourself to look at or change gradients (clipping, GradScaler's
        ``unscale_``) before the step, and then step inside ``with optimizer.skip_synchronize():``.

        Raises:
            OptimizerUseError: a gradient was changed before it was reduced.
            MismatchError: parameters differ between ranks.
            PeerLostError: a rank died.

        Blocks until all ranks called it.
        """
        if self._reducer is not None:
            # Parameters may have been added, or have begun to require a gradient, since the last step.
            known = self._reducer.slots
            if any(p.requires_grad and id(p) not in known for group in self.param_groups for p in group["params"]):
                self._reducer.enroll(self._trained())
            self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` inside the context use the gradients as they are, after ``synchronize()``.

        Without ``synchronize()`` since the last backward pass ``step()`` raises OptimizerUseError.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step with the gradients of all ranks.

        Args:
            closure: computes the gradients anew, perhaps several times; each time they are synchronized.
            args: for the optimizer's own class.
            kwargs: for the optimizer's own class.

        Returns:
            What the optimizer's own class returns.

        Raises:
            OptimizerUseError: a gradient was changed before it was reduced.
            MismatchError: parameters differ between ranks.
            PeerLostError: a rank died.

        Blocks until all ranks called it.
        """
        own_step = super().step  # type: ignore[misc]
        if closure is not None:
            return own_step(self._synchronizing(closure), *args, **kwargs)
        if self._should_synchronize:
            # Gradients of a later backward pass have nothing to do with what was synchronized.
            if not (self._synchronized and self._is_fresh()):
                self.synchronize()
            elif not self._asked_by_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): it takes the gradients as they are now, which `with "
                    "optimizer.skip_synchronize(): optimizer.step()` would say",
                    stacklevel=2,
                )
        elif self._others_count_on_gradients():
            raise out_of_turn(
                "optimizer.step() was called inside optimizer.skip_synchronize() with gradients of this rank alone, "
                "which would make the ranks' models differ",
                "Call optimizer.synchronize() after loss.backward() and before `with optimizer.skip_synchronize():`.",
            )
        self._synchronized = self._asked_by_scaler = False
        return own_step(*args, **kwargs)

    # Tells torch not to wrap this one with step hooks: the optimizer's own step has them, and must run them once.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if not self._should_synchronize:
            return closure

        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            if isinstance(self, torch.optim.LBFGS) and not self._works_alone():
                # It decides by the loss how often to come back: ranks must decide the same.
                with torch.no_grad():
                    loss = comm.allreduce(
                        torch.as_tensor(loss), name="DistributedOptimizer.loss", process_set=self.process_set
                    )
            return loss

        return synchronized

    def _works_alone(self) -> bool:
        return self._reducer is None or not self._reducer.active

    def _is_fresh(self) -> bool:
        return self._reducer is None or self._reducer.fresh

    def _others_count_on_gradients(self) -> bool:
        reducer = self._reducer
        if reducer is None or reducer.fresh or not context.is_initialized():
            return False
        # Before the ranks have agreed on buckets nothing is in flight, and yet this step's gradients would be lost.
        return reducer.in_flight or any(slot.passes_left <= 0 for slot in reducer.slots.values())

    _asked_by_scaler = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks this before it looks at the gradients, and skips the step when they hold an
        # infinity. All ranks must then look at the same gradients, or only some of them would skip.
        if self._should_synchronize and not self._is_fresh():
            self.synchronize()
            self._asked_by_scaler = True
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients; the same arguments as the optimizer's own class, such as ``set_to_none``.

        Raises:
            OptimizerUseError: gradients are being reduced; ``step()`` or ``synchronize()`` must come first.
        """
        if self._others_count_on_gradients():
            raise out_of_turn(
                "optimizer.zero_grad() was called after loss.backward() and before optimizer.step(), while other "
                "ranks count on these gradients",
                "Call it before loss.backward() or after optimizer.step(); to drop gradients, as in a step that is "
                "skipped, call optimizer.synchronize() first, on all ranks.",
            )
        # What was synchronized is gone.
        self._synchronized = False
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their gradients are synchronized from now on. The same on every rank."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._reducer is not None:
            self._reducer.enroll(self._trained())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, and drop what was in flight."""
        if self._reducer is not None:
            self._reducer.drain()
            self._reducer.rearm()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before gradients are reduced; between steps only."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.rearm()

    @staticmethod
    def find_duplicates(names: Iterable[str]) -> set[str]:
        """Return the names that occur more than once."""
        return find_duplicates(names)

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        slots = self._reducer.slots.values() if self._reducer is not None else ()
        return {
            slot.parameter: (slot.pending or (slot.bucket and slot.bucket.pending), None)
            for slot in slots
            if slot.pending is not None or (slot.bucket is not None and slot.bucket.in_flight)
        }

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {slot.parameter for slot in self._reducer.slots.values()} if self._reducer is not None else set()

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        slots = self._reducer.slots.values() if self._reducer is not None else ()
        return {slot.parameter: slot.passes_left for slot in slots}


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step with the gradients of all ranks.

    Gradients are reduced in buckets while backward still runs; ``step()`` waits for them. From the second
    step on each ``p.grad`` is a view of its bucket, which the next backward overwrites: clone a
    gradient that must be kept.

    A parameter that has a gradient on some ranks only counts as zeros on the others; one that has none
    anywhere keeps none. Gradients of several backward passes are summed, then combined over ranks.

    Args:
        optimizer: any torch optimizer. The new one shares its state and its groups.
        named_parameters: names for messages, the same on every rank; typically ``model.named_parameters()``.
        compression: how gradients are sent, such as ``Compression.fp16``.
        backward_passes_per_step: backward passes that are accumulated locally before a step.
        op: Average, Sum, Min, Max, Product, or Adasum.
        gradient_predivide_factor: divides by this before the sum, and by the rest of the average after it.
        num_groups: deprecated; ``groups`` instead.
        groups: lists of parameters whose gradients travel together, or a number of groups. By default
            they travel in buckets of HOROVOD_BUCKET_BYTES.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: ranks that take part; on other ranks the optimizer works alone.

    Returns:
        An optimizer whose class has the name of, and derives from, that of ``optimizer``.

    Raises:
        RequestError: an argument does not fit; names are missing or doubled.
        NotInitializedError: ``init()`` was not called.
    """
    op = resolve_op(op, None)
    context.world()
    keep_out_of_graphs()
    if isinstance(optimizer, _Members | AdasumMembers):
        raise wrong_argument("optimizer is a DistributedOptimizer already; wrap the plain one, once")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise wrong_argument(
            "gradient_predivide_factor needs op=Average. "
            f"Received: gradient_predivide_factor={gradient_predivide_factor}, op={op.name}"
        )
    check_optimizer(optimizer)
    check_compression(compression)
    check_passes(backward_passes_per_step)
    if num_groups:
        warn_deprecated("num_groups is deprecated, use groups instead")
        groups = num_groups if groups is None else groups
    parameters = parameters_of(optimizer)
    named = check_names(parameters, named_parameters)
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    together = check_groups(learning, groups, lambda entry: isinstance(entry, torch.Tensor))
    members = AdasumMembers if op is ReduceOp.ADASUM and (process_set.size() or 1) > 1 else _Members
    cls = type(optimizer)
    distributed: Any = object.__new__(
        type(cls.__name__, (members, cls), {"__doc__": cls.__doc__, "__module__": __name__})
    )
    # The same state and groups, so that schedulers and checkpoints of the plain optimizer keep working. A scheduler
    # may have put its own step on it.
    distributed.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    factor = float(gradient_predivide_factor)
    settings = Settings(op, 1.0 / factor, factor, compression, process_set, sparse_as_dense)
    distributed._set_up(settings, backward_passes_per_step, named, together)
    return distributed
