"""``trainingModel`` and ``inferenceModel``: a model on the software device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from poptorch.choices import OutputMode, ReductionType
from poptorch.hints import recorded_losses
from poptorch.instances import Instances
from poptorch.optim import SGD, in_float32
from poptorch.options import Options
from poptorch.replicas import Replicas, combined, mapped, micro_batch

__all__ = ["PoplarExecutor", "inferenceModel", "trainingModel"]


class PoplarExecutor:
    """A model with its options of execution; ``trainingModel`` and ``inferenceModel`` create it.

    The device uses the model's own tensors, so host and device never differ. Unknown attributes are looked up in the
    model. Methods about weights and the device raise RuntimeError before the model is compiled.

    Args:
        model: the model.
        options: options of the execution.
        training: whether a call makes optimizer steps.
        optimizer: the optimizer; SGD with ``lr=0.01`` when None.
    """

    def __init__(
        self, model: torch.nn.Module, options: Options, training: bool, optimizer: torch.optim.Optimizer | None
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module; received {type(model).__name__}")
        if not isinstance(options, Options):
            raise TypeError(f"options must be poptorch.Options; received {type(options).__name__}")
        options._freeze()
        self._user_model, self._options, self._training = model, options, training
        self._optimizer: torch.optim.Optimizer | None = None
        #: The hyperparameters of each group, the loss scaling and the limit of the gradients' norm.
        self._values: tuple[list[dict[str, Any]], float, float | None]
        self._replicas: Replicas | None = None
        self._instances: Instances | None = None
        self._is_attached = False
        if training:
            self.setOptimizer(SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer)

    # -- calls -----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a combined batch; in training, make one step for each device iteration.

        Args:
            *args: inputs, whose first dimension holds all micro-batches: device iterations, gradient accumulation,
                replicas and batch, in this order.
            **kwargs: inputs by name.

        Returns:
            The results of the model for the micro-batches that the output mode selects, along the first dimension.

        Raises:
            ValueError: an input cannot be divided, or a training model has no loss.

        Blocks, when training, until all instances called.
        """
        self._ensure_ready()
        assert self._replicas is not None
        modes = {module: module.training for module in self._user_model.modules()}
        if self._user_model.training != self._training:
            self._user_model.train(self._training)
        results: list[list[Any]] = []
        try:
            with self._replicas.running():
                for iteration in range(self._options.device_iterations):
                    if self._training:
                        results.append(self._step(iteration, args, kwargs))
                    else:
                        with torch.no_grad():
                            results.append([_detached(out) for out, _ in self._micro_batches(iteration, args, kwargs)])
        finally:
            for module, mode in modes.items():
                module.training = mode
        return self._outputs(results)

    def _step(self, iteration: int, args: Any, kwargs: Any) -> list[Any]:
        """Compute the gradients of all micro-batches of all replicas, then make one optimizer step."""
        optimizer, instances, scaling = self._optimizer, self._instances, self._values[1]
        assert optimizer is not None and instances is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        touched = list(dict.fromkeys([*parameters, *self._user_model.parameters()]))
        before = [p.grad for p in touched]
        outputs = []
        try:
            for p in touched:
                p.grad = None
            for output, loss in self._micro_batches(iteration, args, kwargs):
                (loss * scaling).backward()  # type: ignore[no-untyped-call]
                outputs.append(_detached(output))
            training, divisor = self._options.Training, scaling
            if training.reduction == ReductionType.Mean:
                divisor *= training.gradient_accumulation * instances.replicas
            with in_float32(optimizer, parameters):
                gradients = [p.grad for p in parameters if p.grad is not None]
                if divisor != 1:
                    torch._foreach_div_(gradients, divisor)
                self._values = instances.add_up(gradients, self._values)
                self._update(optimizer, parameters)
        finally:
            for p, gradient in zip(touched, before, strict=True):
                p.grad = gradient
        return outputs

    def _update(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Make a step with the hyperparameters of the last ``setOptimizer``, even if the optimizer has others now."""
        hyperparameters, _, limit = self._values
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        users = [_hyperparameters(group) for group in optimizer.param_groups]
        try:
            for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
                group.update(values)
            optimizer.step()
        finally:
            for group, values in zip(optimizer.param_groups, users, strict=True):
                group.update(values)

    def _micro_batches(self, iteration: int, args: Any, kwargs: Any) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield output and loss of each micro-batch of one device iteration."""
        options, replicas = self._options, self._replicas
        assert replicas is not None
        accumulation = options.Training.gradient_accumulation if self._training else 1
        count = options.device_iterations * accumulation * replicas.count
        factors = (
            f"{options.device_iterations} device iterations x {accumulation} gradient accumulation x "
            f"{replicas.count} replicas"
        )
        for number in range(accumulation * replicas.count):
            place = iteration * accumulation * replicas.count + number
            own_args, own_kwargs = micro_batch((args, kwargs), place, count, factors)
            with replicas.replica(number % replicas.count), recorded_losses() as losses:
                output = self._user_model(*own_args, **own_kwargs)
                yield output, _loss(output, losses) if self._training else torch.zeros(())

    def _outputs(self, results: list[list[Any]]) -> Any:
        mode, replicas = self._options.output_mode, self._options.replication_factor
        if mode == OutputMode.Default:
            mode = OutputMode.Final if self._training else OutputMode.All
        if mode == OutputMode.Final:
            return combined(results[-1][-replicas:])
        if mode == OutputMode.Sum:
            flat = [piece for step in results for piece in step]
            return combined([mapped(lambda *t: torch.stack(t).sum(0), *flat[r::replicas]) for r in range(replicas)])
        period = self._options.output_return_period if mode == OutputMode.EveryN else 1
        return combined([piece for step in results[period - 1 :: period] for piece in step])

    # -- getting ready -----------------------------------------------------------------------------------------------

    def _ensure_ready(self) -> None:
        if self._replicas is not None:
            return
        options = self._options
        if not self._training and options.Training.gradient_accumulation != 1:
            raise ValueError(
                f"inferenceModel: gradientAccumulation={options.Training.gradient_accumulation} has no meaning without "
                f"training; make options of their own for inference"
            )
        if options.output_mode == OutputMode.EveryN and options.device_iterations % options.output_return_period:
            raise ValueError(
                f"outputMode(EveryN, {options.output_return_period}) does not divide {options.device_iterations} "
                f"device iterations"
            )
        first = options.replication_factor * options.Distributed.processId
        if self._training:
            self._instances = Instances(options)
            assert self._optimizer is not None
            self._values = self._instances.compare(self._user_model, self._optimizer, self._values)
            first = self._instances.first_replica
        seed = torch.initial_seed() if options.random_seed is None else options.random_seed
        self._replicas = Replicas(self._user_model, options.replication_factor, seed % (1 << 62), first)
        self._is_attached = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Prepare for calls without compiling. A training model connects to the other instances here.

        Args:
            *args: inputs of a call; they are not read.
            **kwargs: inputs by name.
        """
        self._ensure_ready()

    def isCompiled(self) -> bool:
        """Return whether the model is ready for calls."""
        return self._replicas is not None

    def destroy(self) -> None:
        """Undo ``compile``."""
        self._replicas = self._instances = None
        self._is_attached = False

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer's hyperparameters, and its state if it loaded one; else the present state stays.

        Args:
            optimizer: the same optimizer with other values, or another one of its class for the same parameters.

        Raises:
            RuntimeError: this is an inference model.
            TypeError: the argument is not an optimizer, or has another class than before.
            ValueError: the groups of parameters differ, or none of them is the model's.
        """
        if not self._training:
            raise RuntimeError("setOptimizer needs a training model: see poptorch.trainingModel")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"setOptimizer takes an optimizer; received {type(optimizer).__name__}")
        known = set(map(id, self._user_model.parameters()))
        if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("the optimizer has no parameter of this model, so that nothing would be trained")
        present = self._optimizer
        if present is not None and optimizer is not present:
            if type(optimizer) is not type(present):
                raise TypeError(
                    f"setOptimizer: {type(optimizer).__name__} cannot follow {type(present).__name__}, whose state it "
                    f"does not understand; make another training model"
                )
            new, old = ([list(map(id, g["params"])) for g in each.param_groups] for each in (optimizer, present))
            if new != old:
                raise ValueError("setOptimizer: the groups of parameters are not those of the optimizer before")
            if all(not own.get("step", 1) for own in optimizer.state.values()):  # none was loaded; Adagrad is at 0
                optimizer.state = present.state
        self._optimizer = optimizer
        groups = [copy.deepcopy(_hyperparameters(group)) for group in optimizer.param_groups]
        scaling, limit = getattr(optimizer, "loss_scaling", 1.0), getattr(optimizer, "max_grad_norm", None)
        self._values = groups, float(scaling), limit

    # -- weights and device ------------------------------------------------------------------------------------------

    def copyWeightsToHost(self) -> None:
        """Do nothing: the weights are already on the host."""
        self._need_compiled("copyWeightsToHost")

    def copyWeightsToDevice(self) -> None:
        """Reset the buffers of all replicas to the model's; weights are shared with the device."""
        self._need_compiled("copyWeightsToDevice")
        assert self._replicas is not None
        self._replicas.forget_buffers()

    def _need_compiled(self, function: str) -> None:
        if self._replicas is None:
            raise RuntimeError(f"{function}() before the model was compiled: call the model or compile() first")

    def isAttachedToDevice(self) -> bool:
        """Return whether the model has a device."""
        return self._is_attached

    def attachToDevice(self) -> None:
        """Reattach the device."""
        self._need_compiled("attachToDevice")
        self._is_attached = True

    def detachFromDevice(self) -> None:
        """Detach the device; the next call reattaches it."""
        self._need_compiled("detachFromDevice")
        self._is_attached = False

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The options, frozen."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not hasattr(self._user_model, name):
            owner = type(self._user_model).__name__
            raise AttributeError(f"neither PopTorch in software nor {owner} has {name!r}. See docs/popdist.md")
        return getattr(self._user_model, name)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _detached(value: Any) -> Any:
    return mapped(lambda tensor: tensor.detach().clone(), value)  # weights and buffers change with the next step


def _loss(output: Any, marked: list[torch.Tensor]) -> torch.Tensor:
    """Return the last tensor marked by ``identity_loss``, or else the last scalar output that requires a gradient."""
    tensors: list[torch.Tensor] = []
    mapped(tensors.append, output)
    found = marked or [t for t in tensors if not t.dim() and t.requires_grad]
    if not found:
        raise ValueError(
            "a training model returns its loss, a number that depends on its weights, and this one returns none: "
            "compute the loss in forward(), mark it with poptorch.identity_loss(loss, reduction='mean'), and return it"
        )
    loss = found[-1]
    if len(marked) > 1 and not _depends_on(loss, marked[:-1]):
        raise ValueError(
            f"{len(marked)} losses are marked, and the last one does not depend on all others, so that they would not "
            "be trained: add them up, and mark the sum with poptorch.identity_loss(total, reduction='none')"
        )
    if not loss.requires_grad:
        raise ValueError("the loss depends on no weight that is trained: was it detached, or is everything frozen?")
    return loss.sum() if loss.dim() else loss


def _depends_on(loss: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Return whether the loss depends on all ``others`` in the autograd graph."""
    missing = {other.grad_fn for other in others if other.grad_fn is not None and other is not loss}
    todo, seen = [loss.grad_fn], set()
    while todo and missing:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            missing.discard(node)
            todo += [following for following, _ in node.next_functions]
    return not missing


def trainingModel(
    model: torch.nn.Module, options: Options | None = None, optimizer: torch.optim.Optimizer | None = None
) -> PoplarExecutor:
    """Return a model whose calls train it.

    Args:
        model: its ``forward`` takes data and targets; the loss is one of its results.
        options: options of the execution.
        optimizer: an optimizer of ``poptorch.optim`` or ``torch.optim``; SGD with ``lr=0.01`` when omitted.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
    """
    return PoplarExecutor(model, options or Options(), True, optimizer)


def inferenceModel(model: torch.nn.Module, options: Options | None = None) -> PoplarExecutor:
    """Return a model whose calls evaluate it.

    Args:
        model: the model; training of the same model continues to change it.
        options: options of the execution.

    Raises:
        TypeError: ``model`` is not a module.
    """
    return PoplarExecutor(model, options or Options(), False, None)
