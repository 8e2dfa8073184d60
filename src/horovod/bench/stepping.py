"""Training steps of several ways in alternating rounds, and a check that all of them train the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from horovod.bench.control import Agreement, Tell, WrongResultError, timed
from horovod.bench.stats import slowest, summarize

__all__ = ["Arm", "run_train", "time_steps"]

_CHECK_STEPS = 2

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Arm:
    """One way to train."""

    name: str  # name of its row
    step: Callable[[], None]  # one optimizer step
    weights: Callable[[], Array]  # returns all parameters as one array
    close: Callable[[], None] = lambda: None  # ends the processes of the arm
    # takes a number of steps and returns the seconds of each of them; by default they are called one by one
    times: Callable[[int], list[float]] | None = None
    base: str = ""  # the arm without communication to compare this one with, if it is not the first


def run_train(
    models: Sequence[str],
    make_task: Callable[..., Any],
    arms: Sequence[Callable[[Any], Arm]],
    control: Agreement,
    tell: Tell,
    *,
    rounds: int = 7,
    steps: int = 3,
    tiny: bool = False,
) -> list[dict[str, Any]]:
    """Measure every model with every arm, which take turns; called on all ranks, in step. The first arm is the one
    without communication. One untimed step goes before the timed ones of a turn; ``tiny`` models are for tests. Return
    one row per model; rank 0's is the result.
    """
    rows = []
    for number, name in enumerate(models):
        done, total = number * (rounds + 1) * len(arms), len(models) * (rounds + 1) * len(arms)
        tell(done, total, f"{name}: building")
        built = [make(make_task(name, control.rank, tiny=tiny)) for make in arms]
        for place, arm in enumerate(built):
            tell(done + place, total, f"{name}: first steps, {arm.name}")
            for _ in range(_CHECK_STEPS):
                arm.step()
        _check(built, control, name)
        times: dict[str, list[list[float]]] = {arm.name: [] for arm in built}
        for turn in range(rounds):
            # Alternate the order, so that a machine that slows down affects all arms.
            for place, arm in enumerate(built if turn % 2 == 0 else built[::-1]):
                tell(done + (turn + 1) * len(arms) + place, total, f"{name}: round {turn + 1} of {rounds}, {arm.name}")
                times[arm.name].append(_measure(arm, control, steps))
        rows.append(_row(name, built, times))
        for arm in built:
            arm.close()
    tell(1, 1, "done")
    return rows


def time_steps(arm: Arm, steps: int) -> list[float]:
    """Return the seconds of each of some steps."""
    return timed(arm.step, steps) if arm.times is None else arm.times(steps)


def _measure(arm: Arm, control: Agreement, steps: int) -> list[float]:
    control.barrier()
    arm.step()
    return slowest(control.gather(time_steps(arm, steps)))


def _check(arms: Sequence[Arm], control: Agreement, name: str) -> None:
    """Check that all ranks hold the same parameters, and that all arms that communicate agree."""
    reference: Array | None = None
    alone = {arms[0].name, *(arm.base for arm in arms)}
    communicating = [arm for arm in arms if arm.name not in alone]
    for arm in communicating:
        flat = arm.weights().astype(np.float64)
        sums = control.gather((float(flat.sum()), float(np.square(flat).sum())))
        if len(set(sums)) != 1:
            raise WrongResultError(f"{name}: after {_CHECK_STEPS} steps of {arm.name} the ranks differ: {sums}")
        if reference is None:
            reference = flat
        elif not np.allclose(flat, reference, rtol=1e-3, atol=1e-5):
            worst = float(np.abs(flat - reference).max())
            raise WrongResultError(
                f"{name}: {communicating[0].name} and {arm.name} differ by {worst:g} on rank {control.rank}"
            )


def _row(name: str, arms: Sequence[Arm], times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return step times, and for each arm its time beyond no communication (median over paired rounds)."""
    results: dict[str, dict[str, float]] = {}
    for arm in arms:
        base = arm.base or arms[0].name
        sample = summarize(one for turn in times[arm.name] for one in turn)
        extra = [median(turn) - median(alone) for turn, alone in zip(times[arm.name], times[base], strict=True)]
        exposed = median(extra)
        alone_s = median(one for turn in times[base] for one in turn)
        results[arm.name] = {
            **sample,
            "exposed_s": exposed,
            "efficiency": min(1.0, alone_s / (alone_s + exposed)) if exposed > 0 else 1.0,
        }
    return {
        "model": name,
        "parameters": arms[0].weights().size,
        "results": results,
    }
