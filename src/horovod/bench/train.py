"""A training step with horovod, with torch DDP over Gloo, and with no communication, in alternating rounds."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod.bench.control import Control, WrongResultError
from horovod.bench.events import Tell
from horovod.bench.models import Task, make_task
from horovod.bench.stats import slowest, summarize

__all__ = ["Arm", "ddp_arm", "horovod_arm", "local_arm", "run_train", "time_steps"]

_CHECK_STEPS = 2
_RATE = 0.01


@dataclass
class Arm:
    """One way to train.

    Attributes:
        name: its row.
        model: what it trains, after the wrapping that belongs to it.
        step: one optimizer step.
    """

    name: str
    model: torch.nn.Module
    step: Callable[[], None]


def _sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


def _stepper(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        task.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def local_arm(task: Task) -> Arm:
    """Every rank trains alone: what a step costs without communication."""
    return Arm("no communication", task.model, _stepper(task, task.model, _sgd(task.model)))


def ddp_arm(task: Task) -> Arm:
    """torch DDP at its best on CPU: gradients are views of its buckets, buffers are not broadcast in a step."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
    model = DistributedDataParallel(task.model, **options)
    return Arm("ddp", task.model, _stepper(task, model, _sgd(model)))


def horovod_arm(task: Task) -> Arm:
    """The five lines of a horovod script."""
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(_sgd(task.model), named_parameters=task.model.named_parameters())
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    return Arm("horovod", task.model, _stepper(task, task.model, optimizer))


def run_train(
    models: Sequence[str],
    arms: Sequence[Callable[[Task], Arm]],
    control: Control,
    tell: Tell,
    *,
    rounds: int = 7,
    steps: int = 3,
    tiny: bool = False,
) -> list[dict[str, Any]]:
    """Measure every model with every arm; called on all ranks, in step.

    Args:
        models: names for ``make_task``.
        arms: the first is the one without communication.
        control: how the ranks agree.
        tell: progress.
        rounds: how often the arms take turns.
        steps: timed steps of one turn; one untimed step goes before them.
        tiny: smoke-size models.

    Returns:
        One row per model; rank 0's is the result.
    """
    rows = []
    for number, name in enumerate(models):
        tell(number * (rounds + 1), len(models) * (rounds + 1), f"{name}: check")
        built = [make(make_task(name, control.rank, tiny=tiny)) for make in arms]
        _check(built, control, name)
        times: dict[str, list[list[float]]] = {arm.name: [] for arm in built}
        for turn in range(rounds):
            tell(number * (rounds + 1) + turn + 1, len(models) * (rounds + 1), name)
            for arm in built:
                times[arm.name].append(_measure(arm, control, steps))
        rows.append(_row(name, built, times))
    tell(1, 1, "done")
    return rows


def time_steps(arm: Arm, steps: int) -> list[float]:
    """Return how many seconds each of some steps took."""
    clock = time.perf_counter
    spent = []
    for _ in range(steps):
        start = clock()
        arm.step()
        spent.append(clock() - start)
    return spent


def _measure(arm: Arm, control: Control, steps: int) -> list[float]:
    control.barrier()
    arm.step()
    return slowest(control.gather(time_steps(arm, steps)))


def _flat(arm: Arm) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in arm.model.parameters()])


def _check(arms: Sequence[Arm], control: Control, name: str) -> None:
    """After a few steps all ranks hold the same parameters, and all arms that communicate agree."""
    for arm in arms:
        for _ in range(_CHECK_STEPS):
            arm.step()
    reference: torch.Tensor | None = None
    for arm in arms[1:]:
        flat = _flat(arm)
        sums = control.gather((float(flat.double().sum()), float(flat.double().square().sum())))
        if len(set(sums)) != 1:
            raise WrongResultError(f"{name}: after {_CHECK_STEPS} steps of {arm.name} the ranks differ: {sums}")
        if reference is None:
            reference = flat
        elif not torch.allclose(flat, reference, rtol=1e-3, atol=1e-5):
            worst = float((flat - reference).abs().max())
            raise WrongResultError(f"{name}: {arms[1].name} and {arm.name} differ by {worst:g} on rank {control.rank}")


def _row(name: str, arms: Sequence[Arm], times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Step times, and for each arm what it takes beyond no communication (median over paired rounds)."""
    base = arms[0].name
    results: dict[str, dict[str, float]] = {}
    for arm in arms:
        sample = summarize(one for turn in times[arm.name] for one in turn)
        extra = [median(turn) - median(alone) for turn, alone in zip(times[arm.name], times[base], strict=True)]
        exposed = median(extra)
        alone_s = median(one for turn in times[base] for one in turn)
        results[arm.name] = {
            **sample.to_json(),
            "exposed_s": exposed,
            "efficiency": min(1.0, alone_s / (alone_s + exposed)) if exposed > 0 else 1.0,
        }
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in arms[0].model.parameters()),
        "results": results,
    }
