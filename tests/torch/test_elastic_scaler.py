"""A GradScaler in an elastic state: what it has noted in a step that fails must not stop the repeated step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_double import Job

import horovod.torch as hvd
from horovod.errors import PeerLostError


def _train(fails_after_step: bool | None) -> Any:
    """Train two models; in the third step, a rank is lost between the first one's ``unscale_`` and ``update``."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    first, second = models
    state = hvd.elastic.TorchState(first, optimizers[0], second=second, other=optimizers[1], scaler=scaler, batch=0)
    failures = [] if fails_after_step is None else [PeerLostError("rank 1 is lost by the test")]

    @hvd.elastic.step
    def one(state: Any) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 2)).square().sum()).backward()
            scaler.unscale_(optimizer)
            if model is models[bool(fails_after_step)] and state.batch == 2 and failures:
                raise failures.pop()
            scaler.step(optimizer)
        scaler.update()
        state.batch += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 5:
            one(state)
            state.commit()

    train(state)
    assert not failures
    return [parameter.tolist() for model in models for parameter in model.parameters()]


@pytest.mark.parametrize("fails_after_step", [False, True])
def test_a_failed_step_is_done_again_with_a_scaler(fails_after_step: bool, job: Job) -> None:
    assert _train(fails_after_step) == _train(None)
