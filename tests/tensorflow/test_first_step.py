"""Loops of one's own that nobody gave equal variables."""

from __future__ import annotations

from typing import Any

import pytest
from harness import on_ranks, run_ranks
from heard import heard
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


def _trains(mode: str, broadcast: str) -> list[str]:
    from horovod.tensorflow.first_step import warn_now

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
    with heard() as said:
        for number in range(4):
            run(tf.constant(1.0), number == 0)
            if number == 0 and broadcast == "outside":
                hvd.broadcast_variables(weights, root_rank=0)
        warn_now()
    return said


@pytest.mark.parametrize("mode", ["eager", "function", "nested"])
def test_a_loop_that_never_broadcasts_is_told_once(mode: str) -> None:
    first, second = run_ranks(2, _trains, mode, "never", framework="tensorflow")
    assert second == []
    assert len(first) == 1
    assert "the ranks train different models: own:0" in first[0]
    assert "on rank 1. Call hvd.broadcast_variables(model.variables, root_rank=0)" in first[0]


@pytest.mark.parametrize("broadcast", ["before", "after", "outside"])
@pytest.mark.parametrize("mode", ["eager", "function", "nested"])
def test_a_loop_that_broadcasts_before_or_after_its_first_step_is_fine(mode: str, broadcast: str) -> None:
    assert run_ranks(2, _trains, mode, broadcast, framework="tensorflow") == [[], []]


@on_ranks(2, framework="tensorflow", returns=[[], []])
def test_passes_of_the_first_step_may_come_before_the_broadcast() -> list[str]:
    from horovod.tensorflow.first_step import warn_now

    weight = tf.Variable(1.0 + hvd.rank())
    with heard() as said:
        for step in range(3):
            total = tf.constant(0.0)
            for _ in range(4):
                with tf.GradientTape() as tape:
                    loss = weight * weight
                total += hvd.DistributedGradientTape(tape).gradient(loss, weight)
            weight.assign_sub(0.1 * total)
            if step == 0:
                hvd.broadcast_variables([weight], root_rank=0)
        warn_now()
    return said


@pytest.mark.parametrize("in_graph", [False, True])
@on_ranks(2, framework="tensorflow")
def test_a_rank_of_one_step_that_joins_meets_the_others_in_the_next_epoch(in_graph: bool) -> None:
    weight = tf.Variable(1.0)
    join = tf.function(hvd.join) if in_graph else hvd.join
    for _ in range(3):
        for _ in range(1 if hvd.rank() else 3):
            with tf.GradientTape() as tape:
                loss = weight * weight
            weight.assign_sub(0.1 * hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, weight))
        join()
        hvd.broadcast_variables([weight], root_rank=0)
    assert float(weight) == pytest.approx((0.6 * 0.8 * 0.8) ** 3)


@on_ranks(2, framework="tensorflow", returns=[True, False])
def test_models_made_one_after_the_other_are_told_apart() -> bool:
    kept, numbers, is_again = [], set(), False
    for number in range(100):
        weight = tf.Variable(tf.ones([3]), name=f"weight_{number}")
        if hvd.rank() == 0:
            is_again |= id(weight) in numbers
            numbers.add(id(weight))
        else:
            kept.append(weight)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight)
            hvd.DistributedGradientTape(tape).gradient(loss, weight)
        del weight, tape, loss
    return is_again


@on_ranks(3, framework="tensorflow", returns=[3.0, 3.0, 2.0])
def test_a_step_of_some_ranks_does_not_count_as_the_first_step_of_all() -> float:
    weight = tf.Variable(0.0)
    some = hvd.add_process_set([0, 1])
    for members in (some, hvd.global_process_set, hvd.global_process_set):
        if members.included():
            with tf.GradientTape() as tape:
                loss = weight * 1.0
            weight.assign_add(hvd.DistributedGradientTape(tape, process_set=members).gradient(loss, weight))
    return float(weight)
