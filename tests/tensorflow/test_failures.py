"""Failures in TensorFlow's modes, and their errors."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Ranks, on_ranks
from later import later

from horovod.bindings.compression import BucketCompressor

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@on_ranks(2, framework="tensorflow")
def test_a_mismatch_names_every_ranks_value_and_line(mode: str) -> None:
    def reduce(x):
        return hvd.allreduce(x, name="uneven")  # the line that is named

    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        if mode == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                session.run(reduce(tf.ones([2 + hvd.rank()])))
        else:
            (tf.function(reduce) if mode == "function" else reduce)(tf.ones([2 + hvd.rank()]))
    if mode == "eager":
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert caught.value.args == (str(caught.value),)
    # The job goes on.
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == 2.0
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the line that is named"))
    text = str(caught.value)
    assert "Mismatched ALLREDUCE tensor shapes" in text
    assert f"rank 0: [2]  allreduce at {__file__}:{line}" in text
    assert f"rank 1: [3]  allreduce at {__file__}:{line}" in text
    if mode != "eager":
        # The lines that made the node, but not ours.
        assert f'File "{__file__}", line {line}, in reduce' in text
        assert str(Path(hvd.__file__).parents[1]) not in text


@on_ranks(1, framework="tensorflow")
def test_an_unknown_process_set_is_an_error_where_the_graph_is_built() -> None:
    gone = hvd.ProcessSet([0])
    gone.process_set_id = 77
    for collective in (
        hvd.allreduce,
        hvd.allgather,
        lambda x, process_set: hvd.broadcast(x, 0, process_set=process_set),
    ):
        # It is not run: what is wrong is said while it is built.
        with pytest.raises(ValueError, match="process set 77 does not exist"):
            tf.function(lambda x, f=collective: f(x, process_set=gone)).get_concrete_function(tf.ones([3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="process set 77 does not exist"):
        hvd.size_op(77)
    for query in (hvd.size_op, hvd.process_set_included_op):
        with pytest.raises(TypeError, match=r"must be an integer, such as hvd.add_process_set.* Received: None"):
            query(hvd.ProcessSet([0]).process_set_id)  # not registered
    with tf.GradientTape() as tape, pytest.raises(ValueError, match="must be a ProcessSet"):
        hvd.DistributedGradientTape(tape, process_set=[0])
    with pytest.raises(ValueError, match=r"lists of variables. Received: \['ResourceVariable'\]"):
        hvd.DistributedGradientTape(tape, groups=[tf.Variable(1.0)])
    with pytest.raises(ValueError, match="must be a ProcessSet"):
        hvd.SyncBatchNormalization(process_set=[0])
    with pytest.raises(hvd.HorovodInternalError, match=r"TensorFlowState takes variables.*MutableHashTable"):
        hvd.elastic.TensorFlowState([tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)])


@on_ranks(1, framework="tensorflow")
def test_a_node_of_another_version_fails_where_it_would_run() -> None:
    """Of a saved graph, for example."""
    from horovod.tensorflow.nodes import node
    from horovod.tensorflow.requests import GraphRequest

    strange: Any = "as many as you like"
    with pytest.raises(tf.errors.InvalidArgumentError, match="ValidationError: Expected `int`, got `str`"):
        node("HorovodSize", [], [tf.int32], GraphRequest(process_set=strange))


@on_ranks(1, init=False, framework="tensorflow")
def test_what_a_function_raises_is_of_the_same_class_after_autograph() -> None:
    @tf.function
    def before_init(x):
        return x * hvd.size()

    @tf.function
    def odd():
        return hvd.allreduce(tf.ragged.constant([[1.0], [1.0, 2.0]]))

    with pytest.raises(hvd.HorovodInternalError, match=r"hvd\.init") as caught:
        before_init(tf.ones([3]))
    assert isinstance(caught.value, ValueError)
    hvd.init()
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be sent as it is") as wrong:
        odd()
    assert isinstance(wrong.value, ValueError)


@pytest.mark.parametrize("mode", ["eager", "function"])
@on_ranks(2, framework="tensorflow")
def test_a_wrong_call_is_an_error_that_scripts_catch(mode: str) -> None:
    def run(function: Any) -> None:
        (tf.function(function) if mode == "function" else function)(tf.ones([3]))

    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="splits"):
        run(lambda x: hvd.alltoall(x, splits=[1, 5]))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="root"):
        run(lambda x: hvd.broadcast(x, 9))
    with pytest.raises(TypeError, match="root_rank must be an integer"):
        run(lambda x: hvd.broadcast(x, 0.5))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="must be finite numbers"):
        run(lambda x: hvd.allreduce(x, prescale_factor="2"))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="must be finite numbers"):
        # A graph's attribute cannot hold it, so the node would never run.
        run(lambda x: hvd.allreduce(x, postscale_factor=math.inf))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="keeps a state for each bucket"):
        run(lambda x: hvd.allreduce(x, compression=BucketCompressor()))
    with pytest.raises(TypeError, match="string"):
        run(lambda x: hvd.allreduce(tf.constant("text")))
    for odd in (tf.ragged.constant([[1.0], [1.0, 2.0]]), tf.sparse.from_dense([[1.0, 0.0]])):
        with pytest.raises(ValueError, match="cannot be sent as it is"):
            run(lambda x, odd=odd: hvd.allreduce(odd))
    with pytest.raises(ValueError, match="op must be"):
        run(lambda x: hvd.allreduce(x, op=99))
    layer = hvd.SyncBatchNormalization(process_set=hvd.ProcessSet([0, 1]))
    layer.build((None, 3))
    with pytest.raises(ValueError, match="not registered"):
        run(lambda x: layer(x[None], training=True))


@on_ranks(2, framework="tensorflow")
def test_a_dataset_that_takes_several_elements_at_once_refuses_collectives() -> None:
    def total(x: Any) -> Any:
        return hvd.allreduce(x * (hvd.rank() + 1), op=hvd.Sum, name="total")

    numbers = tf.data.Dataset.range(4)
    np.testing.assert_array_equal([*numbers.map(total).as_numpy_iterator()], [0, 3, 6, 9])
    for parallel in (
        lambda: numbers.map(total, num_parallel_calls=2),
        lambda: numbers.interleave(lambda n: tf.data.Dataset.range(n).map(total), num_parallel_calls=2),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="Leave out num_parallel_calls"):
            parallel()


def _late(number: Any) -> Any:
    """Return ``number``, but later on one rank if it is odd, and on the other one if it is even."""

    def wait(number: Any) -> Any:
        if number % 2 == hvd.rank():
            time.sleep(0.05)
        return number

    made = tf.numpy_function(wait, [number], number.dtype, stateful=False)
    made.set_shape([])
    return made


def _in_a_loop_of_version_one(one: Any, turns: int) -> Any:
    def step(i: Any, rows: Any) -> Any:
        return i + 1, rows.write(i, one(i))

    begin = [0, tf.TensorArray(tf.int32, 6)]
    return tf.compat.v1.while_loop(lambda i, _: i < 6, step, begin, parallel_iterations=turns)[1].stack()


@pytest.mark.parametrize("is_new", [False, True], ids=["control flow v1", "control flow v2"])
@on_ranks(2, framework="tensorflow", env={"TF_NUM_INTEROP_THREADS": "6"})
def test_a_loop_of_version_one_that_takes_several_turns_at_once_refuses_collectives(is_new: bool) -> None:
    (tf.compat.v1.enable_control_flow_v2 if is_new else tf.compat.v1.disable_control_flow_v2)()

    def total(i: Any) -> Any:
        return hvd.allreduce(_late(i), op=hvd.Sum, name="total")

    for build in (
        lambda turns: _in_a_loop_of_version_one(total, turns),
        lambda turns: _in_a_loop_of_version_one(tf.function(total), turns),
        lambda turns: _in_a_loop_of_version_one(lambda i: tf.cond(i >= 0, lambda: total(i), lambda: i), turns),
        lambda turns: tf.map_fn(total, tf.range(6), parallel_iterations=turns),
    ):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            np.testing.assert_array_equal(session.run(build(1)), 2 * np.arange(6))
            with pytest.raises(ValueError, match=r"parallel_iterations=3: .*Pass parallel_iterations=1 to the"):
                build(3)


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@on_ranks(2, framework="tensorflow")
def test_ranks_with_other_numbers_of_variables_do_not_wait_for_each_other(mode: str) -> None:
    with tf.Graph().as_default() if mode == "session" else contextlib.nullcontext():
        kind = tf.compat.v1.Variable if mode == "session" else tf.Variable
        variables = [kind(float(hvd.rank()), name=name) for name in ("first", "second")[: 2 - hvd.rank()]]
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            if mode == "session":
                with tf.compat.v1.Session() as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    session.run(hvd.broadcast_variables(variables, root_rank=0))
            elif mode == "function":
                tf.function(lambda: hvd.broadcast_variables(variables, root_rank=0))()
            else:
                hvd.broadcast_variables(variables, root_rank=0)
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == 2.0
    text = str(caught.value)
    if mode == "eager":
        assert "same names on every rank. Received rank 0: 2, rank 1: 1\n  only rank 0 has: second:0" in text
    else:
        assert "One rank had [2], another had [1], in broadcast 'broadcast_variables.number_of_variables" in text


@on_ranks(1, init=False, framework="tensorflow")
def test_calls_before_init_say_so() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"hvd\.init"):
        hvd.allreduce(tf.constant(1.0))
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.size()
    assert int(hvd.process_set_included_op()) == -1


def _until_somebody_dies(mode: str) -> tuple[str, str]:
    @tf.function
    def step(x):
        for _ in tf.range(10_000_000):
            x = hvd.allreduce(x)
        return x

    # All are inside.
    hvd.barrier()
    if hvd.rank() == 1:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        if mode == "function":
            step(tf.ones([1000]))
        elif mode == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                total = tf.reduce_sum(hvd.allreduce(tf.ones([1000])))
                while True:
                    session.run(total)
        else:
            while True:
                hvd.allreduce(tf.ones([1000]))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing"


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_a_rank_that_dies_inside_ends_the_others(mode: str) -> None:
    ranks = Ranks(3, _until_somebody_dies, (mode,), framework="tensorflow")
    outcomes = ranks.outcomes()
    assert outcomes[1].exitcode == -signal.SIGALRM
    for rank in (0, 2):
        kind, text = outcomes[rank].value
        assert kind == ("PeerLostError" if mode == "eager" else "UnknownError")
        assert "rank 1" in text
        assert "SIGALRM" in text
