"""A failure in a compiled program reaches every rank: as horovod's own error, with the user's line, in time."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from harness import Ranks, on_ranks, run_ranks
from later import later

from horovod import context
from horovod.errors import MismatchError, PeerLostError, RequestError

hvd, jax, jnp = later("horovod.jax"), later("jax"), later("jax.numpy")


@on_ranks(2, framework="jax")
def test_a_mismatch_in_a_program_is_told_on_every_rank_with_the_line() -> None:
    rank, told = hvd.rank(), []
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for function in (program, lambda x: hvd.allreduce(x, op=hvd.Sum)):
        with pytest.raises(MismatchError) as caught, hvd.typed_errors():
            jax.block_until_ready(function(jnp.ones(2 + rank)))
        told.append(str(caught.value))
        assert (caught.value.__cause__ is not None) == (function is program)
    rows = jax.jit(lambda x: hvd.allgather(x))
    with pytest.raises(MismatchError, match=r"needs the same number of rows on every rank"), hvd.typed_errors():
        jax.block_until_ready(rows(jnp.ones((1 + rank, 3))))
    # Outside of the block it is JAX's, with the same words.
    with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError"):
        jax.block_until_ready(program(jnp.ones(5 + rank)))
    # And the job goes on.
    assert program(jnp.ones(2)).sum() == 4
    with pytest.raises(jax.errors.JaxRuntimeError, match="not ours"), hvd.typed_errors():
        jax.block_until_ready(jax.jit(_fail)(jnp.ones(1)))
    for text in told:
        assert "[2]" in text
        assert "[3]" in text
        assert "test_failures.py:2" in text


def _fail(x: Any) -> Any:
    def callback(x: Any) -> Any:
        raise ValueError("not ours")

    return jax.pure_callback(callback, x, x)


@on_ranks(2, framework="jax")
def test_trees_with_other_keys_are_no_match_though_their_shapes_are_equal() -> None:
    x = jnp.ones(3)
    tree = {"b": x, "c": x} if hvd.rank() else {"a": x, "c": x}
    sum_up = lambda tree: hvd.allreduce(tree, op=hvd.Sum)  # noqa: E731
    for function in (sum_up, jax.jit(sum_up), hvd.allgather, hvd.reducescatter, lambda tree: hvd.broadcast(tree, 0)):
        with pytest.raises(MismatchError, match=r"(?s)names of the tensors.*\['a'\], \['c'\].*\['b'\], \['c'\]"):
            with hvd.typed_errors():
                jax.block_until_ready(function(tree))
    deep = {f"layer {i}": {"kernel": x, "bias": x} for i in range(100)}
    assert sum_up(deep)["layer 99"]["bias"].sum() == 6
    with pytest.raises(MismatchError, match="names of the tensors"):
        sum_up({f"layer {i + hvd.rank()}": {"kernel": x, "bias": x} for i in range(100)})
    # Neither a structure without a hash is compared, nor one that refuses to be rebuilt from other leaves.
    jax.tree_util.register_pytree_node(_Rows, lambda own: ((own.x,), own.more), lambda more, x: _Rows(*x, more))
    for more in ([hvd.rank()], hvd.rank()):
        assert sum_up(_Rows(x, more)).x.sum() == 6


class _Rows:
    def __init__(self, x: Any, more: Any) -> None:
        assert x.ndim == 1
        self.x, self.more = x, more


@on_ranks(2, framework="jax")
def test_what_has_no_place_in_a_program_is_refused_with_a_remedy() -> None:
    x = jnp.ones(4)
    for call in (
        lambda: hvd.barrier(),
        lambda: hvd.join(),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.allreduce_async(x),
        lambda: hvd.broadcast_async(x, 0),
        lambda: hvd.alltoall_async(x),
        lambda: hvd.alltoall(x, splits=[2, 2]),
    ):
        with pytest.raises(RequestError, match=r"inside a program.*test_failures.py"):
            jax.jit(lambda call=call: call())()
    with pytest.raises(RequestError, match=r"root_rank must be known when JAX traces.*static_argnames"):
        jax.jit(lambda root: hvd.broadcast(x, root))(0)
    for run in (jax.jit, lambda function: function):
        with pytest.raises(RequestError, match=r"factor must be finite numbers.*'2', 1.0"):
            run(lambda: hvd.allreduce(x, prescale_factor="2"))()
    with pytest.raises(RequestError, match=r"factor must be finite numbers.*Trace[dr]"):
        jax.jit(lambda factor: hvd.reducescatter(x, postscale_factor=factor))(2.0)
    with pytest.raises(RequestError, match=r"at most 2147483647 rows can go to one rank"):
        hvd.alltoall(x, splits=[2**40, 4])
    one = hvd.add_process_set([0])
    if hvd.rank() == 1:
        with pytest.raises(RequestError, match="of which rank 1 is not a member"):
            jax.jit(lambda: hvd.allreduce(x, process_set=one))()
    else:
        assert jax.jit(lambda: hvd.allreduce(x, process_set=one))().sum() == 4


def _loses_a_rank(size: int, what: str) -> None:
    def step(carry: Any, _: Any) -> Any:
        return hvd.allreduce(carry @ carry / size) / carry.shape[0], None

    def turns(x: Any) -> Any:
        return jax.lax.scan(step, x, None, length=50)[0]

    program = (lambda x: step(x, None)[0]) if what == "eager" else jax.jit(turns)
    x = jnp.ones((size, size))
    with hvd.typed_errors():
        for turn in range(1000):
            if hvd.rank() == 1 and turn == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            x = program(x)
            if what == "waits":
                x.block_until_ready()
        x.block_until_ready()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "what"), [(4, "eager"), (4, "waits"), (300, "goes on")])
def test_a_rank_that_is_killed_ends_the_programs_of_the_others(size: int, what: str) -> None:
    ranks = Ranks(3, _loses_a_rank, (size, what), framework="jax")
    outcomes = ranks.outcomes()
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, PeerLostError), outcome.text
        assert "rank 1" in str(outcome.error)
        assert "SIGKILL" in str(outcome.error)


def _one_thread() -> float:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["NPROC"] = "1"
    import optax

    assert len(os.sched_getaffinity(0)) == 1
    params = [jnp.ones((600, 600)) / 600 for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer)
        return hvd.allreduce(x.sum())

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(5):
        params, state = step(params, state, jnp.ones((50, 600)))
    hvd.barrier()
    return float(hvd.allreduce(params[0].sum()))


def test_one_thread_is_enough() -> None:
    first, second = run_ranks(2, _one_thread, framework="jax", fresh=True)
    assert first == second


def _several_devices() -> None:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    assert jax.device_count() == 2
    mesh = Mesh(np.array(jax.devices()), ("local",))
    sharding = NamedSharding(mesh, PartitionSpec("local"))
    x = jax.device_put(jnp.arange(4.0) + hvd.rank(), sharding)
    got = hvd.allreduce(x, op=hvd.Sum)
    assert got.sharding == sharding
    np.testing.assert_allclose(got, [1, 3, 5, 7])
    mapped = jax.shard_map(
        lambda x: hvd.allreduce(x), mesh=mesh, in_specs=PartitionSpec("local"), out_specs=PartitionSpec("local")
    )
    programs = [jax.jit(mapped), jax.jit(lambda x: hvd.allreduce(x)), jax.pmap(hvd.allreduce)]
    for program, value in zip(programs, (x, x, np.ones((2, 1))), strict=True):
        with pytest.raises(RequestError, match=r"a program for 2 devices of one process .*jax.lax.pmean"):
            program(value)
    sent = hvd.broadcast_parameters({"x": x, "keys": jax.random.split(jax.random.key(hvd.rank()), 2)}, root_rank=1)
    assert sent["x"].sharding == sharding
    np.testing.assert_allclose(sent["x"], np.arange(4.0) + 1)
    np.testing.assert_allclose(jax.vmap(hvd.allreduce)(x), np.arange(4.0) + 0.5)
    second = jax.device_put(jnp.ones(2), jax.devices()[1])
    for got in (hvd.allreduce(second), jax.jit(lambda x: hvd.allreduce(x))(second)):
        assert got.devices() == {jax.devices()[1]}


def test_several_local_devices() -> None:
    outcomes = Ranks(
        2, _several_devices, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, framework="jax"
    ).outcomes()
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], outcomes[0].text + outcomes[1].text


@on_ranks(2, framework="jax")
def test_an_interrupt_in_a_program_is_one_outside_and_leaves_xlas_memory_alone() -> None:
    program = jax.jit(lambda x: hvd.allreduce(x + 1, op=hvd.Sum, name="once"))
    for count in (3, 300_000):
        x = jnp.zeros(count)
        if hvd.rank() == 0:
            engine = context.engine()

            def interrupt() -> None:
                while not any(handle.accepted for handle in engine.in_flight()):
                    pass
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            with pytest.raises(KeyboardInterrupt), hvd.typed_errors():
                thread.start()
                program(x).block_until_ready()
                threading.Event().wait(60)
            thread.join()
            (handle,) = engine.in_flight()
            result = handle.outputs[0]
            # Not XLA's memory, which goes with the program that failed.
            assert result.base is None and (np.asarray(handle.inputs[0]) == 1).all()
        hvd.broadcast_object(None, name="go")
        if hvd.rank() == 1:
            assert program(x)[0] == 2
        hvd.barrier()
        if hvd.rank() == 0:
            assert (result == 2).all()
        assert program(x).sum() == 2 * count
