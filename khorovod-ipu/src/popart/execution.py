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

# These functions of torch have no type annotations.
_call_when_final: Callable[..., Any] = torch.Tensor.register_post_accumulate_grad_hook
_call_with_gradient: Callable[..., Any] = torch.Tensor.register_hook


class Exchange(Protocol):
    """Exchange of gradients between backward and the update.

    Attributes:
        gives_weights: whether ``load`` returns the new weight instead of a gradient.
    """

    gives_weights: bool

    def begin(self) -> None:
        """Prepare for a run; called at its beginning. Most have nothing to check."""
        return

    def store(self, weight: str, gradient: torch.Tensor) -> None:
        """Take a final gradient; called during backward, which continues afterwards."""

    def load(self, weight: str) -> torch.Tensor:
        """Return the result; called after the last ``store`` of a step."""


class KeptHere(Exchange):
    """No exchange: the gradients stay local."""

    gives_weights = False

    def __init__(self) -> None:
        self._gradients: dict[str, torch.Tensor] = {}

    def store(self, weight: str, gradient: torch.Tensor) -> None:
        self._gradients[weight] = gradient

    def load(self, weight: str) -> torch.Tensor:
        return self._gradients.pop(weight)


class Executor:
    """Runs a graph.

    Args:
        nodes: in a computable order.
        weights: tensors on the device, by id; those that require a gradient are trained.
        loss: id of the tensor to minimise; empty for inference.
        watched: ids of tensors whose gradients are returned.
        replicas: number of replicas of the graph in all processes.
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
        """Drop the gradients of an interrupted step, at the beginning of a new one."""
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
        """Run the graph once forward and backward; gradients accumulate.

        Args:
            inputs: arrays by id.
            replica: number of the replica; only running statistics of the first one are kept.
            scale: factor of the loss before backward.
            on_final: called with a weight's id during backward, as soon as its gradient is final; ``None`` for
                all but the last micro-batch of a step.

        Returns:
            All tensors by id, and the watched gradients.
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
            with torch.no_grad():
                for name in run.assigned.keys() & self._weights.keys():
                    self._weights[name].copy_(run.assigned[name])
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
        """Record the gradients of tensors that are anchors."""
        for name in self._watched.intersection(names):
            # Use a separate tensor: an operator may return its input, whose gradient may differ.
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
        """Return the sum of a weight's gradients; zeros if the loss of this step did not depend on it."""
        weight = self._trained[name]
        return torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()
