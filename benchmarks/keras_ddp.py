"""A Keras model on torch inside DDP, trained by ``fit()``: the peer of ``horovod.keras`` on that backend."""

from __future__ import annotations

from typing import Any

import torch

from horovod.bench.on_torch import wrap_in_ddp

__all__ = ["train_with_ddp"]


def train_with_ddp(model: Any) -> Any:
    """Let the steps of ``model.fit()`` pass through DDP; return the model."""
    wrapped = wrap_in_ddp(model)

    def train_step(data: Any) -> Any:
        inputs, targets = data[:2]
        model.zero_grad()
        loss = model.compute_loss(inputs, targets, wrapped(inputs, training=True), None)
        loss.backward()
        gradients = [variable.value.grad for variable in model.trainable_weights]
        with torch.no_grad():
            model.optimizer.apply(gradients, model.trainable_weights)
        return {"loss": loss.detach()}

    model.train_step = train_step
    return model
