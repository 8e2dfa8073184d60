"""Loops of one's own that nobody gave equal variables."""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_ranks


def _trains(mode: str, broadcast: str) -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.logs import logger

    said: list[str] = []
    warning, logger.warning = logger.warning, lambda text, *values: said.append(text % values)
    weights = [tf.Variable(tf.ones([3]), name="equal"), tf.Variable(1.0 + hvd.rank(), name="own")]
    alone = tf.Variable(hvd.rank() * 1.0, name="local")

    def step(x: Any, is_first: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights[0] * weights[1]) * x * alone
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(alone)
        gradients = tape.gradient(loss, [*weights, alone])
        for variable, gradient in zip([*weights, alone], gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        if is_first and broadcast == "after":
            hvd.broadcast_variables(weights, root_rank=0)
        return loss

    def outer(x: Any, is_first: bool) -> Any:
        return inner(x, is_first)

    inner = tf.function(step, autograph=False)
    run = {"eager": step, "function": inner, "nested": tf.function(outer, autograph=False)}[mode]
    if broadcast == "before":
        hvd.broadcast_variables(weights, root_rank=0)
    try:
        for number in range(4):
            run(tf.constant(1.0), number == 0)
    finally:
        logger.warning = warning
    return said


@pytest.mark.parametrize("mode", ["eager", "function", "nested"])
def test_a_loop_that_never_broadcasts_is_told_once(mode: str) -> None:
    first, second = run_ranks(2, _trains, mode, "never", framework="tensorflow")
    assert second == []
    assert len(first) == 1
    assert "the ranks train different models: own:0" in first[0]
    assert "on rank 1. Call hvd.broadcast_variables(model.variables, root_rank=0)" in first[0]


@pytest.mark.parametrize("broadcast", ["before", "after"])
@pytest.mark.parametrize("mode", ["eager", "function", "nested"])
def test_a_loop_that_broadcasts_before_or_after_its_first_step_is_fine(mode: str, broadcast: str) -> None:
    assert run_ranks(2, _trains, mode, broadcast, framework="tensorflow") == [[], []]
