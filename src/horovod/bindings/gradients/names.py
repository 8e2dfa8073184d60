"""Names of the operations of a ``DistributedOptimizer``, and their form in messages; see ``horovod.core.labels``."""

from __future__ import annotations

from horovod.core import labels

__all__ = ["ADASUM", "FLAGS", "PREFIX", "WEIGHTS", "in_words"]

PREFIX = "DistributedOptimizer.gradients"
"""Names of the operations of an optimizer begin with it; those of a second one with a number after it."""

ADASUM = "DistributedOptimizer.adasum"
"""Names of the operations of an optimizer that combines the steps of the ranks begin with it."""

FLAGS = ".flags"
"""Names of what tells which gradients of a bucket are there end with it, where that travels apart."""

WEIGHTS = ".weights"
"""Names of what gives every rank the weights of a bucket, each from the rank that has stepped them, end with it."""


def in_words(name: str, times: int) -> str:
    """Return step and parameters of an operation: ``DistributedOptimizer step 118, layer3.weight``.

    Args:
        name: ``PREFIX``, perhaps ``#2``, then ``.survey``, ``.bucket0[first..last]`` or the name of a parameter.
        times: how often it was submitted, which is once a step; 0 if that is not known.
    """
    number, _, what = name.removeprefix(PREFIX).partition(".")
    who = f"DistributedOptimizer{number}"
    if what == "survey":
        return f"{who} before its first step"
    if what.endswith(WEIGHTS):
        return f"{in_words(name.removesuffix(WEIGHTS), times)}: new weights"
    what = what.removesuffix(FLAGS)
    if what.startswith("bucket") and what.endswith("]"):
        first, _, last = what.partition("[")[2][:-1].partition("..")
        what = first if first == last else f"{first} to {last}"
    return f"{who}{_step(times)}, {what}"


def _adasum_in_words(name: str, times: int) -> str:
    return f"DistributedOptimizer (Adasum){_step(times)}, {name.removeprefix(ADASUM + '.')}"


def _step(times: int) -> str:
    return f" step {times}" if times else ""


labels.register(PREFIX, in_words)
labels.register(ADASUM, _adasum_in_words)
