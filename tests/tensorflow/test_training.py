"""Tapes, optimizers and state: what a training script calls besides the collectives."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from harness import on_ranks, run_ranks
from later import later

from horovod.bindings.compression import BucketCompressor

hvd, tf, kernels = later("horovod.tensorflow"), later("tensorflow"), later("horovod.tensorflow.kernels")


@on_ranks(2, framework="tensorflow")
def test_a_distributed_tape_is_a_tape_with_gradients_of_all_ranks() -> None:
    rank = hvd.rank()
    a, b, c = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(5.0)
    plain = tf.GradientTape(persistent=True)
    tape = hvd.DistributedGradientTape(plain)
    assert isinstance(tape, tf.GradientTape)
    with plain:
        y = tf.reduce_sum(a * a) * (rank + 1.0) + b * (rank + 1.0)
    nested = tape.gradient(y, {"a": a, "rest": [b, c]})
    np.testing.assert_allclose(nested["a"], [3.0, 6.0])
    np.testing.assert_allclose(nested["rest"][0], 1.5)
    assert nested["rest"][1] is None
    zero = tape.gradient(y, [c, b], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert [float(grad) for grad in zero] == [0.0, 1.5]
    tape.register_local_source(b)
    assert [float(tf.reduce_sum(grad)) for grad in tape.gradient(y, [a, b])] == [9.0, (rank + 1) / 2]
    local, shared = tape.get_local_and_global_gradients(y, [a, b])
    assert [source is b for source, _ in local] == [True]
    assert [source is a for source, _ in shared] == [True]
    whole = hvd.DistributedGradientTape(plain, scale_local_gradients=False, op=hvd.Sum)
    whole.register_local_source(b)
    assert [float(tf.reduce_sum(grad)) for grad in whole.gradient(y, [a, b])] == [18.0, rank + 1.0]
    # The last settings count, once.
    twice = hvd.DistributedGradientTape(whole, scale_local_gradients=False)
    assert [float(tf.reduce_sum(grad)) for grad in twice.gradient(y, [a, b])] == [9.0, rank + 1.0]


def _gradients_of_some_ranks(mode: str, groups: int, which: str, told: Path) -> tuple[str, list[list[float]]]:
    a, b = tf.Variable([2.0, 4.0]), tf.Variable([3.0, 5.0])
    used = {"fewer": ([a, b], [a]), "others": ([a], [b]), "rows": ([a], [b])}[which][hvd.rank()]

    def gradients(unconnected: tf.UnconnectedGradients) -> Any:
        with tf.GradientTape() as tape:
            rows = [tf.gather(one, [1]) if which == "rows" else one for one in used]
            loss = tf.reduce_prod([tf.reduce_sum(one) for one in rows])
        tape = hvd.DistributedGradientTape(tape, groups=groups)
        return tape.gradient(loss, [a, b], unconnected_gradients=unconnected)

    run = tf.function(gradients) if mode == "function" else gradients
    # The second group of rank 0 is in flight. If rank 1 left too early, TensorFlow could hear of that first.
    is_second_in_flight = mode == "function" and groups > 1
    with contextlib.ExitStack() as stack, pytest.raises(tf.errors.FailedPreconditionError) as caught:
        if is_second_in_flight and hvd.rank() == 0:
            finish = kernels._Run.finish

            def tell(run: Any) -> None:
                finish(run)
                if run._node.request.name.endswith(".0"):
                    told.write_text("")

            stack.enter_context(mock.patch.object(kernels._Run, "finish", tell))
        run(tf.UnconnectedGradients.NONE)
    if is_second_in_flight and hvd.rank() == 1:
        told.read_text()
    if which == "rows" or groups > 1:
        return str(caught.value), []
    return str(caught.value), [grad.numpy().tolist() for grad in run(tf.UnconnectedGradients.ZERO)]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    ("groups", "which", "here", "there", "zeros"),
    [
        (1, "fewer", "2", "1", [[4.5, 4.5], [3.0, 3.0]]),
        (2, "fewer", "gradients of variables 0 to 1", "gradients of variable 0", []),
        (1, "others", "gradients of variable 0", "gradients of variables 0 to 1 without 0", [[0.5, 0.5], [0.5, 0.5]]),
        (
            1,
            "rows",
            "gradients of variable 0, sparse ones of 0",
            "gradients of variables 0 to 1 without 0, sparse ones of 1",
            [],
        ),
    ],
)
def test_gradients_that_only_some_ranks_have_are_told_and_can_be_zeros(
    tmp_path: Path, mode: str, groups: int, which: str, here: str, there: str, zeros: list[list[float]]
) -> None:
    os.mkfifo(told := tmp_path / "told")
    for text, found in run_ranks(2, _gradients_of_some_ranks, mode, groups, which, told, framework="tensorflow"):
        assert re.search(f"rank 0: {here}  +all", text)
        assert re.search(f"rank 1: {there}  +all", text)
        assert found == zeros


@pytest.mark.parametrize(("passes", "op"), [(1, 0), (2, 0), (1, 2)], ids=["one pass", "two passes", "Adasum"])
@on_ranks(2, framework="tensorflow")
def test_optimizers_of_version_one_do_not_mix_gradients_of_different_variables(passes: int, op: int) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        pair = [tf.compat.v1.get_variable(name, initializer=np.ones(2)) for name in "ab"]
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=passes, op=op
        )
        step = optimizer.minimize(tf.reduce_sum(pair[hvd.rank()]), var_list=pair)
        session.run(tf.compat.v1.global_variables_initializer())
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            for _ in range(passes):
                session.run(step)
    assert "rank 0: gradients of variable 0  " in str(caught.value)
    assert "rank 1: gradients of variables 0 to 1 without 0  " in str(caught.value)


@on_ranks(2, framework="tensorflow")
def test_names_that_scripts_take_from_inside_are_there() -> None:
    from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

    a = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allreduce(a) * (hvd.rank() + 1.0))
    np.testing.assert_allclose(tape.gradient(loss, a), [1.5, 1.5])
    assert hvd._executing_eagerly()
    assert hvd.util.refs_to_vars(hvd.vars_to_refs([a, [a]]))[1][0] is a
    assert float(hvd._make_subgraph(lambda x: hvd._allreduce(x))(tf.constant(1.0))) == 2.0
    assert [float(x) for x in hvd._grouped_allreduce([tf.constant(1.0)] * 2)] == [2.0, 2.0]
    assert hvd._reducescatter(tf.ones([2])).numpy().tolist() == [2.0]
    for groups in (0, None):
        reduce = hvd._make_allreduce_grads_fn("x", "", "", hvd.Compression.none, False, hvd.Average, 1.0, groups)
        assert float(reduce([tf.constant(hvd.rank() * 1.0)], [a])[0]) == 0.5
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1]}
    assert hvd.check_num_rank_power_of_2(4)
    assert LocalGradientAggregationHelperEager(1, reduce, False, False).backward_passes_per_step == 1


@pytest.mark.slow
@on_ranks(2, framework="tensorflow", returns=[[1.5, 1.0] * 3] * 2)
def test_torch_and_tensorflow_share_one_engine_in_one_process() -> list[float]:
    import torch

    import horovod.torch as hvd_torch

    @tf.function
    def step(x):
        return hvd.allreduce(x, name="same")

    found = []
    for _ in range(3):
        handle = hvd_torch.allreduce_async(torch.ones(5) * hvd.rank(), name="of torch", op=hvd.Sum)
        found.append(float(step(tf.constant(1.0 + hvd.rank()))))
        found.append(float(hvd_torch.synchronize(handle)[0]))
    return found


@on_ranks(2, framework="tensorflow")
def test_local_layers_keep_their_gradients() -> None:
    rank = hvd.rank()
    keep, share = tf.keras.layers.Dense(2, use_bias=False), tf.keras.layers.Dense(1)
    x = tf.ones([1, 3]) * (rank + 1.0)
    share(keep(x))
    for variable in (*keep.weights, *share.weights):
        variable.assign(tf.ones_like(variable))
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(share(keep(x)))
    tape = hvd.PartialDistributedGradientTape(plain, local_layers=[keep])
    own, kernel, bias = tape.gradient(loss, [*keep.trainable_weights, *share.trainable_weights])
    np.testing.assert_allclose(own, np.full((3, 2), (rank + 1) / 2))
    np.testing.assert_allclose(kernel, np.full((2, 1), 4.5))
    np.testing.assert_allclose(bias, [1.0])
    with pytest.raises(ValueError, match="Layer type"):
        hvd.PartialDistributedGradientTape(plain, local_layers=[x])


@on_ranks(2, framework="tensorflow")
def test_settings_change_how_gradients_travel_and_not_what_they_are() -> None:
    rank = hvd.rank()
    variables = [tf.Variable(tf.ones([3]) * number) for number in range(5)]
    table = tf.Variable(tf.ones([4, 2]))

    def gradients(**settings: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [rank, 3])
            loss = tf.add_n([tf.reduce_sum(v * v) for v in variables]) * (rank + 1.0) + tf.reduce_sum(rows)
        return hvd.DistributedGradientTape(tape, **settings).gradient(loss, [*variables, table])

    usual = gradients()
    for settings in (
        {"groups": 2},
        {"groups": [[variables[3], variables[0]], [variables[1]]]},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 2.0},
    ):
        for got, want in zip(gradients(**settings, sparse_as_dense=True), usual, strict=True):
            np.testing.assert_allclose(got, tf.convert_to_tensor(want))
    for number, grad in enumerate(usual[:5]):
        np.testing.assert_allclose(grad, np.full(3, 3.0 * number))
    assert isinstance(usual[5], tf.IndexedSlices)
    np.testing.assert_allclose(tf.convert_to_tensor(usual[5]), [[0.5] * 2, [0.5] * 2, [0.0] * 2, [1.0] * 2])
    with pytest.warns(DeprecationWarning, match="groups"):
        np.testing.assert_allclose(gradients(num_groups=1, sparse_as_dense=True)[4], np.full(3, 12.0))
    for wrong in (
        {"groups": "all"}, {"groups": 0}, {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"compression": BucketCompressor()},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"groups|predivide|keeps a state"):
            gradients(**wrong)
    # A part of what is in groups, some of which the loss does not depend on, can be differentiated by itself.
    x = tf.constant(rank + 1.0)
    with tf.GradientTape(persistent=True) as recorded:
        loss = tf.reduce_sum(variables[1] * x) + tf.reduce_sum(variables[3] * x)
    tape = hvd.DistributedGradientTape(recorded, groups=[[variables[0], variables[1], variables[2]], [variables[3]]])
    np.testing.assert_allclose(tape.gradient(loss, variables[1]), np.full(3, 1.5))
    first, second, third = tape.gradient(loss, [variables[3], variables[0], variables[1]])
    np.testing.assert_allclose([first, third], np.full((2, 3), 1.5))
    assert second is None


@pytest.mark.parametrize("mode", ["eager", "function"])
@on_ranks(2, framework="tensorflow")
def test_several_passes_make_one_step(mode: str) -> None:
    from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelperEager

    reduced = []

    def reduce(grads: Any, variables: Any) -> Any:
        reduced.append(len(grads))
        return [hvd.allreduce(grad, op=hvd.Sum) for grad in grads]

    a, b = tf.Variable(0.0), tf.Variable(0.0)
    helper = LocalGradientAggregationHelperEager(3, reduce, False, True)
    helper.register_local_var(b)

    class Optimizer:
        iterations = tf.Variable(0)

    def apply(grads: Any) -> None:
        a.assign_add(grads[0])
        b.assign_add(grads[1])
        Optimizer.iterations.assign_add(1)

    def one_pass(x: Any) -> None:
        grads = helper.compute_gradients([x, x], [a, b])
        pairs = list(zip(grads, [a, b], strict=True))
        helper.apply_gradients(lambda: apply(grads), Optimizer, pairs)

    run = tf.function(one_pass) if mode == "function" else one_pass
    for number in range(7):
        run(tf.constant(float(number)) * (hvd.rank() + 1.0))
    # Passes 0 to 5 make two steps; the seventh waits for more.
    assert float(a) == 3.0 * (0 + 1 + 2 + 3 + 4 + 5) / 3
    assert float(b) == (hvd.rank() + 1.0) / 2 * 15 / 3
    assert int(Optimizer.iterations) == 7
    assert int(helper.counter) == 1
    with pytest.raises(ValueError, match="sparse_as_dense"):
        helper.compute_gradients([tf.IndexedSlices([1.0], [0]), tf.constant(0.0)], [a, b])
    with pytest.raises(ValueError, match="> 0"):
        LocalGradientAggregationHelperEager(0, reduce, False, True)


@pytest.mark.parametrize("mode", ["eager", "function"])
@on_ranks(2, framework="tensorflow")
def test_passes_may_have_other_variables_in_another_order(mode: str) -> None:
    from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelperEager

    def reduce(grads: Any, variables: Any) -> Any:
        return [hvd.allreduce(grad, op=hvd.Average) for grad in grads]

    helper = LocalGradientAggregationHelperEager(2, reduce, False, False)
    a, b, c, new = (tf.Variable(0.0) for _ in range(4))

    def one_pass(variables: Any, *values: Any) -> Any:
        run = tf.function(lambda *grads: helper.compute_gradients(list(grads), variables))
        return (run if mode == "function" else run.python_function)(*map(tf.constant, values))

    one_pass([a, b, c], 1.0 + hvd.rank(), 10.0, 100.0)
    # ``a`` was frozen, and ``new`` has its first gradient.
    assert [float(grad) for grad in one_pass([c, new, b], 100.0, 7.0, 20.0)] == [200.0, 7.0, 30.0]


@on_ranks(2, framework="tensorflow", returns=[[-1.0, -1.0]] * 2)
def test_adasum_combines_the_steps_of_the_ranks() -> list[float]:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        weights = v1.get_variable("w", initializer=np.array([1.0, 1.0]))
        loss = weights[hvd.rank()] * 4.0
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
        train = optimizer.minimize(loss)
        with v1.train.MonitoredTrainingSession() as session:
            session.run(train)
            return list(session.run(weights))


@on_ranks(2, framework="tensorflow")
def test_an_optimizer_of_version_one_keeps_its_methods() -> None:
    v1 = tf.compat.v1
    with pytest.raises(ValueError, match=r"not supported for an optimizer of tf\.compat\.v1"):
        hvd.DistributedOptimizer(v1.train.AdamOptimizer(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="average_aggregated_gradients"):
        hvd.DistributedOptimizer(v1.train.AdamOptimizer(), op=hvd.Adasum, average_aggregated_gradients=True)
    with tf.Graph().as_default():
        weights, own = v1.get_variable("w", initializer=1.0), v1.get_variable("o", initializer=1.0)
        optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.9))
        optimizer.register_local_var(own)
        train = optimizer.minimize((weights + own) * (hvd.rank() + 1.0))
        assert optimizer.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(weights, "momentum") is not None
        assert len(optimizer.variables()) == 2
        with v1.train.MonitoredTrainingSession() as session:
            session.run(train)
            found = session.run([weights, own])
    assert found == [-0.5, 1 - (hvd.rank() + 1) / 2]


@pytest.mark.parametrize("mode", ["eager", "function"])
@on_ranks(2, framework="tensorflow")
def test_variables_and_objects_are_made_the_same(mode: str) -> None:
    rank = hvd.rank()
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 3))
    variables = [tf.Variable(float(rank)), tf.Variable([rank, rank], dtype=tf.int64), *layer.weights]
    give = hvd.broadcast_variables

    def from_rank_1() -> None:
        give(variables, 1)

    (tf.function(from_rank_1) if mode == "function" else from_rank_1)()
    assert float(variables[0]) == 1.0
    assert variables[1].numpy().tolist() == [1, 1]
    kernels = hvd.allgather_object(layer.kernel.numpy())
    np.testing.assert_array_equal(kernels[0], kernels[1])
    with pytest.raises(ValueError, match="takes variables"):
        give([tf.constant(1.0)], 0)
    for alone in (layer, layer.kernel, variables[0]):
        with pytest.raises(ValueError, match=r"takes a list of variables, such as model.variables"):
            give(alone, 0)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert hvd.broadcast_object_fn(root_rank=1, name="again")(rank) == 1


def _exports(folder: str) -> float:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(2.0 + hvd.rank())

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def __call__(self, x: Any) -> Any:
            return x * self.weight

    model = Model()
    hvd.broadcast_variables(model.trainable_variables, root_rank=0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant([1.0 + hvd.rank()])))
        (grad,) = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        model.weight.assign_sub(grad)

    step()
    if hvd.rank() == 0:
        tf.saved_model.save(model, folder)
        model.step = step
        tf.saved_model.save(model, folder + "-with-training")
    return float(model.weight)


def _loaded(folder: str) -> float:
    return float(tf.saved_model.load(folder)(tf.constant([4.0]))[0])


def test_a_trained_model_is_exported_without_horovod(tmp_path: Any) -> None:
    from commands import run

    assert run_ranks(2, _exports, str(tmp_path / "model"), framework="tensorflow") == [0.5, 0.5]
    assert run_ranks(1, _loaded, str(tmp_path / "model-with-training"), framework="tensorflow") == [2.0]
    program = (
        "import sys, tensorflow as tf; model = tf.saved_model.load('model'); "
        "print('found', float(model(tf.constant([4.0]))[0]), 'horovod' in sys.modules)"
    )
    code, output = run(["python", "-c", program], cwd=tmp_path)
    assert code == 0, output
    assert "found 2.0 False" in output
