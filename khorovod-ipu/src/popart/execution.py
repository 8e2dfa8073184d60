"""One optimizer step, or one batch of inference: micro-batches forward and backward, gradients out, updates in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from popart.errors import popart_exception
from popart.hostreduce import GRADIENT
from popart.kernels import GraphNode, GraphRun, compute
from popart.shapes import misfit
from popart.tensors import from_torch

__all__ = ["Exchange", "Executor", "KeptHere"]

# torch does not say what these take and return.
_call_when_final: Callable[..., Any] = torch.Tensor.register_post_accumulate_grad_hook
_call_with_gradient: Callable[..., Any] = torch.Tensor.register_hook


class Exchange(Protocol):
    """The way of a gradient from backward to the update.

    Attributes:
        gives_weights: whether ``load`` returns the new weight and not a gradient.
    """

    gives_weights: bool

    def begin(self) -> None:
        """A run begins."""

    def store(self, weight: str, gradient: torch.Tensor) -> None:
        """Take a gradient, as soon as it is final; backward goes on after that."""

    def load(self, weight: str) -> torch.Tensor:
        """Return the result; called after the last ``store`` of a step."""


class KeptHere:
    """No exchange: the gradients stay as they were computed here."""

    gives_weights = False

    def __init__(self) -> None:
        self._gradients: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Nothing to check."""

    def store(self, weight: str, gradient: torch.Tensor) -> None:
        """Keep it."""
        self._gradients[weight] = gradient

    def load(self, weight: str) -> torch.Tensor:
        """Return it."""
        return self._gradients.pop(weight)


class Executor:
    """Runs a graph.

    Args:
        nodes: in an order that can be computed.
        weights: tensors on the device, by id; those that require a gradient are trained.
        loss: id of what is minimised; empty for inference.
        watched: ids whose gradients are wanted.
        replicas: of the graph in this process.
    """

    def __init__(
        self,
        nodes: Sequence[GraphNode],
        weights: Mapping[str, torch.Tensor],
        loss: str,
        watched: Sequence[str],
        replicas: int,
    ) -> None:
        self._nodes, self._weights, self._loss, self._watched = nodes, weights, loss, frozenset(watched)
        self._replicas = replicas
        self.generator = torch.Generator()
        self._trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self._on_final: Callable[[str], None] | None = None
        for name, weight in self._trained.items():
            _call_when_final(weight, lambda _, name=name: self._final(name))

    def _final(self, name: str) -> None:
        if self._on_final is not None:
            self._on_final(name)

    def forget_gradients(self) -> None:
        """Begin a step: drop the gradients of an interrupted one."""
        self._on_final = None
        for weight in self._trained.values():
            weight.grad = None

    def micro_batch(
        self,
        inputs: Mapping[str, torch.Tensor],
        replica: int,
        scale: float,
        on_final: Callable[[str], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run the graph once, and backward, whose gradients add up.

        Args:
            inputs: by id.
            replica: number of the replica; running statistics of the first are kept.
            scale: the loss is multiplied by it before backward.
            on_final: called with a weight's id, while backward goes on, as soon as its gradient is final; ``None`` for
                all but the last micro-batch of a step.

        Returns:
            All tensors by id, and the gradients that are watched.
        """
        run = GraphRun({**self._weights, **inputs}, bool(self._loss), self.generator, self._replicas)
        caught: dict[str, torch.Tensor] = {}
        with torch.set_grad_enabled(bool(self._loss)):
            self._watch(run, run.values, caught)
            for node in self._nodes:
                self._compute(run, node)
                self._watch(run, node.outputs, caught)
        if self._loss:
            self._backward(run.values[self._loss], scale, on_final)
        if replica == 0:
            for name, value in run.assigned.items():
                with torch.no_grad():
                    self._weights[name].copy_(value)
        return {**run.values, **caught}

    def _compute(self, run: GraphRun, node: GraphNode) -> None:
        try:
            compute(run, node)
        except (RuntimeError, IndexError, TypeError) as error:
            if isinstance(error, popart_exception):
                raise
            infos = [from_torch(run.values[name]) if name else None for name in node.inputs]
            raise popart_exception(misfit(node, infos, error)) from error

    def _watch(self, run: GraphRun, names: Iterable[str], caught: dict[str, torch.Tensor]) -> None:
        """Note the gradients of those of some tensors that are anchors."""
        for name in self._watched.intersection(names):
            # A tensor of its own: an operator may return its input, whose gradient can be another one.
            value = run.values[name]
            value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            run.values[name], caught[GRADIENT + name] = value, torch.zeros_like(value)

            def keep(gradient: torch.Tensor, key: str = GRADIENT + name) -> None:
                caught[key] = gradient.detach().clone()

            _call_with_gradient(value, keep)

    def _backward(self, loss: torch.Tensor, scale: float, on_final: Callable[[str], None] | None) -> None:
        if not loss.requires_grad:
            raise popart_exception(f"the loss {self._loss!r} does not depend on any weight")
        self._on_final = on_final
        try:
            loss.reshape(()).backward(torch.tensor(scale, dtype=loss.dtype))  # type: ignore[no-untyped-call]
        finally:
            self._on_final = None

    def gradient(self, name: str) -> torch.Tensor:
        """Return the sum of a weight's gradients; zeros where the loss of this step did not depend on it."""
        weight = self._trained[name]
        return torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()
