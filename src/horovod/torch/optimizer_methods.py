"""Methods of a distributed optimizer, which override the wrapped class's methods; see ``DistributedOptimizer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod import context
from horovod.bindings.compression import compress
from horovod.bindings.gradients.collective import BucketCollective
from horovod.bindings.gradients.parameters import check_passes, find_duplicates
from horovod.bindings.gradients.reducer import Reducer
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import out_of_turn
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp
from horovod.torch.gradient_adapter import TorchGradients
from horovod.torch.runtime import comm

__all__ = ["Named", "OptimizerMethods", "gradients"]

Named = list[tuple[str, torch.Tensor]]

gradients = TorchGradients()


class OptimizerMethods:
    """See the module."""

    _settings: ReduceSettings
    _reducer: Reducer | None
    _synchronized: bool
    _should_synchronize: bool

    state: Any
    backward_passes_per_step: int
    op: ReduceOp
    process_set: ProcessSet
    _groups: list[list[torch.Tensor]] | None
    _parameter_names: dict[torch.Tensor, str]

    def _set_up(
        self, settings: ReduceSettings, passes: int, named: Named, groups: list[list[torch.Tensor]] | None
    ) -> None:
        self._settings, self.op, self.process_set = settings, settings.op, settings.process_set
        self.backward_passes_per_step = passes
        self._groups = groups
        self._parameter_names = {parameter: name for name, parameter in named}
        self._synchronized, self._should_synchronize = False, True
        self._reducer = self._make_reducer(settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters. The plain optimizer, and so its schedulers, share the list: setting it fills it."""
        if "param_groups" not in self.__dict__:
            raise AttributeError("param_groups")  # Fabric's wrapper derives from this class; it asks the optimizer then
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups[:] = groups

    def __reduce__(self) -> Any:
        """Copy and pickle the plain optimizer, which knows no other ranks."""
        state = self.__getstate__()  # type: ignore[attr-defined]  # torch defines it
        return object.__new__, (type(self).__bases__[1],), state

    def _make_reducer(self, settings: ReduceSettings) -> Reducer | None:
        bucket_bytes, passes = context.config().bucket_bytes, self.backward_passes_per_step
        collective, groups = self._collective(settings), self._groups or ()
        return Reducer(self._trained(), settings, passes, groups, bucket_bytes, gradients, collective)

    def _collective(self, settings: ReduceSettings) -> BucketCollective | None:
        """Return the operation that reduces buckets; None for the default."""
        return None

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and parameter of all that require a gradient, in group order; give names to those without."""
        names = self._parameter_names
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad:
                    yield names.setdefault(parameter, f"allreduce.noname.{number}.{index}"), parameter

    def synchronize(self) -> None:
        """Wait until every gradient is reduced over all ranks.

        ``step()`` calls it. Call it yourself to read or change gradients (clipping, GradScaler's
        ``unscale_``) before the step, and then step inside ``with optimizer.skip_synchronize():``.

        Raises:
            OptimizerUseError: a gradient was changed before it was reduced.
            MismatchError: parameters differ between ranks.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

        Blocks until all ranks called it.
        """
        if self._reducer is not None:
            # Since the last step, parameters may have been added or may have begun to require a gradient.
            known = self._reducer.slots
            if any(p.requires_grad and id(p) not in known for group in self.param_groups for p in group["params"]):
                self._reducer.enroll(self._trained())
            self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which ``step()`` uses the present gradients; call ``synchronize()`` before it.

        ``step()`` raises OptimizerUseError if ``synchronize()`` was not called after the last backward pass.
        """
        before, self._should_synchronize = self._should_synchronize, False
        try:
            yield
        finally:
            self._should_synchronize = before

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step with the gradients of all ranks.

        Args:
            closure: computes the gradients again, possibly several times; they are synchronized each time.
            args: positional arguments for the wrapped optimizer's ``step``.
            kwargs: keyword arguments for the wrapped optimizer's ``step``.

        Returns:
            The value that the optimizer's own class returns.

        Raises:
            OptimizerUseError: a gradient was changed before it was reduced.
            MismatchError: parameters differ between ranks.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

        Blocks until all ranks called it.
        """
        if closure is not None:
            return self._own_step(self._synchronizing(closure), *args, **kwargs)
        if self._should_synchronize:
            # Gradients of a backward pass after synchronize() are not synchronized yet.
            if not (self._synchronized and self._is_fresh()):
                self.synchronize()
            elif not self._means_synchronized:
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
        self._synchronized = self._means_synchronized = False
        return self._own_step(*args, **kwargs)

    # Tell torch not to wrap this ``step`` with hooks: the wrapped optimizer's step already runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _own_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)  # type: ignore[misc]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if not self._should_synchronize:
            return closure

        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            if isinstance(self, torch.optim.LBFGS) and not self._works_alone():
                # LBFGS repeats the closure depending on the loss: all ranks must see the loss of these gradients.
                with torch.no_grad():
                    loss = comm.allreduce(
                        torch.as_tensor(loss),
                        name="DistributedOptimizer.loss",
                        op=self.op,
                        process_set=self.process_set,
                    )
            return loss

        return synchronized

    def _works_alone(self) -> bool:
        return self._reducer is None or not self._reducer.active

    def _is_fresh(self) -> bool:
        return self._reducer is None or self._reducer.fresh

    def _others_count_on_gradients(self) -> bool:
        reducer = self._reducer
        if reducer is None or reducer.fresh or not context.is_initialized() or reducer.is_stale:
            return False
        # Before the ranks agree on buckets, nothing is in flight, but this step's gradients would still be lost.
        return reducer.in_flight or any(slot.passes_left <= 0 for slot in reducer.slots.values())

    # True if our own code synchronized the gradients: then step() need not warn about a missing skip_synchronize().
    _means_synchronized = False

    def _before_scaled_step(self) -> None:
        """Raise if this optimizer's gradients cannot be unscaled."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step reads this before it checks the gradients; it skips the step if they hold an infinity.
        # All ranks must check the same gradients, or only some ranks would skip.
        self._before_scaled_step()
        if self._should_synchronize and not self._is_fresh():
            self.synchronize()
            self._means_synchronized = True
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients; takes the wrapped optimizer's arguments, such as ``set_to_none``.

        Raises:
            OptimizerUseError: gradients are being reduced; ``step()`` or ``synchronize()`` must come first.
        """
        if self._others_count_on_gradients():
            raise out_of_turn(
                "optimizer.zero_grad() was called after loss.backward() and before optimizer.step(), while other "
                "ranks count on these gradients",
                "Call it before loss.backward() or after optimizer.step(); to drop gradients, as in a step that is "
                "skipped, call optimizer.synchronize() first, on all ranks. If they come from another model's loss, as "
                "in a GAN, set requires_grad_(False) on this model meanwhile.",
            )
        # The synchronized gradients are reset.
        self._synchronized = False
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and synchronize their gradients from now on. Call it equally on every rank."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._reducer is not None:
            self._reducer.enroll(self._trained())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, and drop operations in flight."""
        if self._reducer is not None:
            self._reducer.drain()
            self._reducer.rearm()
        self._synchronized = False
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)  # type: ignore[misc]
        # Torch makes new ones, but the plain optimizer, and so its schedulers, share the old ones.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        loaded_state = dict(self.state)
        state.clear()
        state.update(loaded_state)
        self.__dict__["param_groups"], self.state = groups, state

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before gradients are reduced; call it only between steps."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.rearm()

    find_duplicates = staticmethod(find_duplicates)

    def _allreduce_grad_async(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Start to reduce one gradient alone; libraries identify Horovod's optimizers by this method, and some call it.

        Args:
            parameter: parameter with a gradient that no other operation is reducing.

        Returns:
            A handle for ``hvd.synchronize``, and the compressor's context to decompress its result.
        """
        (wire,), (context,) = compress(self._settings.compression, [parameter.grad])
        name = f"DistributedOptimizer.{self._parameter_names.get(parameter, 'gradient')}"
        return comm.allreduce_async_(wire, name=name, **self._settings.keywords), context

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
