"""Callbacks for both Keras 3 and tf_keras; ``public`` combines them with the ``Callback`` class of each.

Keras calls callbacks outside compiled steps, so they can run collectives directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from horovod import context
from horovod._keras.backends import Backend
from horovod._keras.members import Distributed
from horovod._keras.reduction import GradientReduction
from horovod._keras.unsafe import accumulated_gradients, velocities
from horovod.bindings.elastic.rates import rate_of
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.objects import allgather_object
from horovod.errors import MismatchError
from horovod.logs import logger
from horovod.phrases import list_ranks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Kit",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


@dataclass(frozen=True)
class Kit:
    """The parts of one kind of Keras (Keras 3 or tf_keras) that callbacks and states need."""

    backend: Backend
    broadcast: Callable[[Iterable[Any], int], None]  # sets variables on all ranks to the values of one rank
    is_variable: Callable[[Any], bool]  # returns whether an object is a variable
    innermost: Callable[[Any], Any]  # returns the optimizer inside a loss scaling optimizer
    # creates an optimizer's variables for a model's variables, if they do not exist
    build: Callable[[Any, list[Any]], None]

    def reduction_of(self, optimizer: Any) -> GradientReduction | None:
        """Return an optimizer's reduction; None for a plain optimizer."""
        inner = self.innermost(optimizer)
        return inner._reduction if isinstance(inner, Distributed) else None


class BroadcastGlobalVariablesCallback:
    """Broadcasts the model and the optimizer of one rank to all ranks, before the first step.

    If TensorFlow creates variables only in the first step, they are broadcast there, before they change. Random states
    of layers such as Dropout, and gradients accumulated since the last update, stay local. A later ``fit()`` with the
    same model does not broadcast again; if the model is new on any rank, it is broadcast.

    Args:
        root_rank: rank that sends its values.
        device: accepted.
        local_variables: variables that are not broadcast.
    """

    #: Keras may call ``on_train_batch_end`` on another thread: this is safe, because nothing is left to do then.
    async_safe = True
    _kit: Kit
    model: Any
    params: Mapping[str, Any] | None
    #: Whether this rank joins ranks that have already broadcast, and has their state.
    joins = False

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._seen: Any = None
        self._local: list[Any] = []
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast.

        Args:
            var: variable of the model.

        Raises:
            RequestError: ``var`` is not a variable.
        """
        if not self._kit.is_variable(var):
            raise wrong_argument(f"a local variable must be a variable of the model. Received: {type(var).__name__}")
        self._local.append(var)

    def set_model(self, model: Any) -> None:
        """Turn XLA off for a step that it could not compile; Keras calls this before it compiles the step.

        Args:
            model: the model to train.
        """
        if self._seen is not model:
            self._seen, self.broadcast_done = model, False
        super().set_model(model)  # type: ignore[misc]
        is_distributed = self._kit.reduction_of(model.optimizer) is not None
        if model.jit_compile and is_distributed and self._kit.backend.refuses_xla():
            model.jit_compile = False
            logger.warning(
                "%s is trained without XLA (jit_compile=False): XLA cannot compile a step that talks to other ranks "
                "for this device",
                model.name,
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast existing variables; compare the ranks' planned numbers of steps."""
        if self.joins:
            self.joins, self.broadcast_done = False, True
            return
        self._compare_plans()
        self._look_at_optimizer()
        if self.broadcast_done:
            return
        if self.model.built:
            self._broadcast()
        elif (reduction := self._kit.reduction_of(self.model.optimizer)) is not None:
            reduction.before_first_step.append(self._broadcast)
        else:
            # The model has its own optimizers: broadcast existing variables now, the others after the first step.
            self._send(list(self.model.weights))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast variables that did not exist before the first step."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = True
        model = self.model
        variables = list(model.weights)
        if model.optimizer is not None:
            self._kit.build(model.optimizer, model.trainable_variables)
            own = model.optimizer.variables
            # Sums of gradients between two updates belong to the batches of each rank.
            local = {id(variable) for variable in accumulated_gradients(self._kit.innermost(model.optimizer))}
            variables += [v for v in (own() if callable(own) else own) if id(v) not in local]
        self._send(variables)

    def _send(self, variables: list[Any]) -> None:
        local = {id(variable) for variable in self._local}
        self._kit.broadcast([v for v in variables if id(v) not in local], self.root_rank)

    def _look_at_optimizer(self) -> None:
        """Warn if Keras' own step trains with a plain, not distributed optimizer."""
        world, model = context.world(), self.model
        if world.rank != 0 or world.size == 1 or model.optimizer is None:
            return
        own_step = type(model).train_step.__module__.partition(".")[0] in ("keras", "tf_keras")
        if own_step and self._kit.reduction_of(model.optimizer) is None:
            logger.warning(
                "%s is compiled with a plain %s: each of the %d ranks trains a model of its own. Give compile() "
                "hvd.DistributedOptimizer(optimizer)",
                model.name, type(model.optimizer).__name__, world.size,
            )  # fmt: skip

    def _compare_plans(self) -> None:
        """Raise on all ranks if their planned numbers of steps differ; make all broadcast if one rank must."""
        own = ((self.params or {}).get("steps"), self.broadcast_done)
        plans = allgather_object(own, name="BroadcastGlobalVariablesCallback.steps")
        self.broadcast_done = all(done for _, done in plans)
        found = [steps for steps, _ in plans]
        if len({count for count in found if count is not None}) > 1:
            who: dict[Any, list[int]] = {}
            for rank, count in enumerate(found):
                who.setdefault(count, []).append(rank)
            told = "; ".join(f"{list_ranks(ranks)}: {count}" for count, ranks in who.items())
            least = min(count for count in found if count is not None)
            raise MismatchError(
                f"the ranks would take different numbers of steps per epoch, and wait for ever for those that end "
                f"earlier: {told}. Pass steps_per_epoch={least} to fit() on every rank, drop the last batches, or "
                "repeat the data set"
            )


class MetricAverageCallback:
    """Replaces each metric at the end of an epoch by its average over all ranks.

    Put it before callbacks that use metrics, such as EarlyStopping, so that all ranks make the same decision.

    Args:
        device: accepted.
    """

    _kit: Kit
    model: Any

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average ``logs`` in place.

        Args:
            epoch: number of the epoch that has ended.
            logs: names and values; the same names on every rank.

        Raises:
            MismatchError: the ranks have different metrics, or took different numbers of steps.
        """
        if (reduction := self._kit.reduction_of(self.model.optimizer)) is not None:
            reduction.agree_on_end(f"epoch {epoch + 1} of fit()")
        own = {name: float(value) for name, value in sorted((logs or {}).items()) if _is_number(value)}
        found = allgather_object(own, name="MetricAverageCallback")
        if any(other.keys() != own.keys() for other in found):
            told = "".join(f"\n  rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(found))
            raise MismatchError(f"MetricAverageCallback needs the same metrics on every rank:{told}")
        if logs is not None:
            logs.update({name: sum(other[name] for other in found) / len(found) for name in own})


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0


class LearningRateScheduleCallback:
    """Multiplies the learning rate from one epoch on.

    Args:
        initial_lr: learning rate to multiply.
        multiplier: a number ``m``: the factor is ``m`` to the power of the epochs since ``start_epoch``; or a function
            of the epoch, which is fractional if ``staircase`` is off.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the first epoch in which the rate is no longer set; ``None`` means never.
        staircase: whether to set the rate only at the beginning of an epoch, instead of before each step.
        momentum_correction: whether to scale the optimizer's velocities with the rate, because they contain it.
        steps_per_epoch: number of steps per epoch; by default that of ``fit()``. Needed where ``staircase`` is off.
    """

    _kit: Kit
    model: Any
    params: Mapping[str, Any] | None

    def __init__(
        self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if initial_lr is None:
            raise wrong_argument("initial_lr must be a number: the learning rate that is multiplied. Received: None")
        self.initial_lr = float(initial_lr)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._counts_steps = False
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier, self.staircase = multiplier, staircase
        else:
            number = float(multiplier)
            self.multiplier, self.staircase = (lambda epoch: number ** (epoch - start_epoch)), True

    def on_train_begin(self, logs: Any = None) -> None:
        """Look up the number of steps per epoch, if ``staircase`` is off."""
        if not self.staircase and (self._counts_steps or not self.steps_per_epoch):
            self._counts_steps = True  # and look again in the next fit(), which may have another number
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise wrong_argument(
                    f"{type(self).__name__} sets the learning rate before each step, and fit() does not know how many "
                    "steps an epoch has. Give the callback steps_per_epoch="
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate if it is due."""
        after = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or after or (self.staircase and batch):
            return
        epoch = float(self.current_epoch)
        if not self.staircase:
            epoch += batch / (self.steps_per_epoch or 1)
        self._set_rate(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics.

        Args:
            epoch: number of the epoch that has ended.
            logs: metrics; receives ``lr``.
        """
        if logs is not None:
            logs["lr"] = rate_of(self._kit.innermost(self.model.optimizer))

    def _set_rate(self, rate: float) -> None:
        optimizer = self._kit.innermost(self.model.optimizer)
        before = float(rate_of(optimizer))
        try:
            optimizer.learning_rate = rate
        except TypeError as error:
            raise wrong_argument(
                f"{type(self).__name__} sets the learning rate, but the optimizer follows a schedule of its own; make "
                "it with a number as learning_rate"
            ) from error
        if not (self.momentum_correction and before and rate != before and getattr(optimizer, "momentum", 0)):
            return
        # A velocity is a sum of gradients times learning rates. Scaling it once equals a changed momentum in this
        # step, but also works if the momentum is a constant of the compiled step.
        for velocity in velocities(optimizer):
            velocity.assign(velocity * (rate / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate over some epochs, step by step, from the rate of one process to that of all ranks.

    Args:
        initial_lr: the rate for all ranks, reached in the last step of the warm-up: typically the rate of one process
            times ``hvd.size()``.
        warmup_epochs: number of epochs of the warm-up.
        momentum_correction: whether to scale the optimizer's velocities with the rate, because they contain it.
        steps_per_epoch: number of steps per epoch; by default that of ``fit()``.
        verbose: 1 prints a line on rank 0 at the end of the warm-up.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: float = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:  # fmt: skip
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

        def multiplier(epoch: float) -> float:
            # Use the end of the step, so that the last step of the warm-up has the full rate.
            done = min(1.0, (epoch + 1.0 / (self.steps_per_epoch or 1)) / warmup_epochs) if warmup_epochs else 1.0
            size = context.world().size
            return (done * (size - 1) + 1) / size

        end = -int(-warmup_epochs // 1)
        super().__init__(initial_lr, multiplier, 0, end, False, momentum_correction, steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics, and print the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose and context.world().rank == 0:
            rate = rate_of(self._kit.innermost(self.model.optimizer))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint:
    """Keeps the best model of all epochs in a file that rank 0 writes.

    Put MetricAverageCallback before it, so that it compares metrics of all ranks.

    Args:
        monitor: name of the metric to compare.
        verbose: 1 prints a line when a file is written.
        mode: ``min``, ``max``, or ``auto`` to infer it from the metric's name.
        save_freq: ``epoch``, or a number of steps.
        save_weights_only: whether to omit the optimizer and the model's architecture.
        filepath: path of the file; may be set as an attribute later, before ``fit()``.
    """

    filepath: str | None

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: str | int = "epoch",
        save_weights_only: bool = False, filepath: str | None = None,
    ) -> None:  # fmt: skip
        name = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(  # type: ignore[call-arg]
            name, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, save_best_only=True,
            save_weights_only=save_weights_only,
        )  # fmt: skip
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that ``filepath`` is set."""
        if self.filepath is None:
            raise wrong_argument("BestModelCheckpoint does not know where to write; set its attribute filepath")
        super().on_train_begin(logs)  # type: ignore[misc]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write the file on rank 0, if Keras' own callback would."""
        if context.world().rank == 0:
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the file on rank 0, if Keras' own callback would."""
        if context.world().rank == 0:
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]
