"""Collectives among what else JAX does with programs: run again, batched, donated, compiled ahead, in threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from jax_modes import names_submitted
from later import later

hvd, jax, jnp = later("horovod.jax"), later("jax"), later("jax.numpy")


@on_ranks(2, framework="jax")
def test_what_runs_again_in_backward_has_the_same_names_on_all_ranks() -> None:
    x = jnp.arange(4.0) + hvd.rank()

    def layer(x: Any) -> Any:
        return jnp.sin(hvd.allreduce(x, name="inside")) * 2

    wanted = jax.grad(lambda x: layer(layer(x)).sum())(x)
    found = []
    for policy in (None, jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable):
        again = jax.checkpoint(layer, policy=policy)
        program = jax.jit(jax.grad(lambda x, again=again: again(again(x)).sum()))
        np.testing.assert_allclose(program(x), wanted, rtol=1e-6)
        found.append(names_submitted(program, x))
    assert hvd.allgather_object(found) == [found] * 2
    for names in found:
        assert {name.partition("#")[0] for name in names} == {"allreduce.inside", "allreduce.inside.gradient"}


@on_ranks(2, framework="jax")
def test_batches_of_loops_loops_of_batches_and_conditions() -> None:
    x = jnp.arange(4.0) + hvd.rank()
    doubled = (np.arange(4.0) * 2 + 1) * 2

    def twice(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (hvd.allreduce(c, op=hvd.Sum), None), x, None, length=2)[0]

    cases = [
        (jax.vmap(twice), x, doubled),
        (lambda x: jax.vmap(jax.vmap(hvd.allreduce))(x), x.reshape(2, 2), (np.arange(4.0) + 0.5).reshape(2, 2)),
        (lambda x: jax.lax.map(hvd.allreduce, x), x, np.arange(4.0) + 0.5),
        # A batched condition computes both branches, on all ranks.
        (
            jax.vmap(lambda a: jax.lax.cond(a > 1.5, hvd.allreduce, lambda a: a, a)),
            x,
            np.where(np.asarray(x) > 1.5, np.arange(4.0) + 0.5, x),
        ),
        (
            lambda x: jax.lax.while_loop(lambda c: hvd.allreduce(c, op=hvd.Sum, name="turns") < 8, lambda c: c + 1, x),
            x[0],
            4.0 + hvd.rank(),
        ),
        (jax.pmap(hvd.allreduce), x[None], (np.arange(4.0) + 0.5)[None]),
    ]
    for function, value, want in cases:
        np.testing.assert_allclose(function(value), want)
        np.testing.assert_allclose(jax.jit(function)(value), want)
    both = jax.vmap(lambda a, b: hvd.grouped_allreduce([a, b]), in_axes=(0, None))(x, x)
    np.testing.assert_allclose(both[0], np.arange(4.0) + 0.5)
    # Executed while the program is traced, as JAX was asked to.
    constant = []

    @jax.jit
    def program(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            constant.append(hvd.allreduce(jnp.ones(2), op=hvd.Sum))
        return x + constant[0][0]

    np.testing.assert_allclose(program(x), x + 2)
    assert constant[0].tolist() == [2, 2]


@on_ranks(2, framework="jax")
def test_arguments_that_are_donated_kept_or_sent() -> None:
    rank = hvd.rank()
    total = np.arange(5000.0) * 2 + 1

    def fresh() -> Any:
        return jnp.arange(5000.0) + rank

    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    kept = fresh()
    np.testing.assert_allclose(jax.jit(reduce)(kept), total)
    np.testing.assert_allclose(kept, fresh(), err_msg="an argument is not written over")
    # Nor copied, to be reduced in place.
    assert "alias" not in jax.jit(reduce).lower(kept).as_text()
    assert "alias" in jax.jit(lambda x: reduce(x * 2)).lower(kept).as_text()
    both = jax.jit(lambda x: (x, reduce(x), x * 2))(kept)
    np.testing.assert_allclose(both[0], fresh())
    np.testing.assert_allclose(both[2], fresh() * 2)
    given = fresh()
    np.testing.assert_allclose(jax.jit(reduce, donate_argnums=0)(given), total)
    assert given.is_deleted()
    pair = jax.jit(lambda x, y: (reduce(x), reduce(y) + x), donate_argnums=(0, 1))(fresh(), fresh())
    np.testing.assert_allclose(pair[0], total)
    np.testing.assert_allclose(pair[1], total + fresh())
    compiled = jax.jit(reduce, donate_argnums=0).lower(jax.ShapeDtypeStruct((5000,), jnp.float32)).compile()
    np.testing.assert_allclose(compiled(fresh()), total)
    # Donated while it is being sent: JAX keeps the memory, because we look at it.
    sent = fresh()
    handle = hvd.allreduce_async(sent, op=hvd.Sum)
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(sent))
    np.testing.assert_allclose(hvd.synchronize(handle), total)
    with pytest.raises(RuntimeError, match="deleted"):
        hvd.allreduce(given)
    # One function, several shapes, traced in another order on each rank.
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for count in (1, 2, 3):
        program.lower(jnp.ones(count if rank else 4 - count))
    assert [program(jnp.ones(count)).shape for count in (3, 1, 2, 3)] == [(3,), (1,), (2,), (3,)]
    for value in (1.5, np.float32(1.5), jnp.asarray(1.5)):
        assert float(jax.jit(lambda x: hvd.allreduce(x * 2.0, op=hvd.Sum))(value)) == 6.0
    # A weak type says nothing about what travels.
    assert hvd.allreduce(jnp.asarray(1.0) if rank else 1.0, name="weak").dtype == jnp.float32


@on_ranks(2, framework="jax", returns=[{factor: [2.0 * factor * turn for turn in range(20)] for factor in (1, 2)}] * 2)
def test_programs_of_two_threads() -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}

    def work(factor: int) -> None:
        program = jax.jit(lambda x: hvd.allreduce(x * factor, op=hvd.Sum, name=f"thread{factor}"))
        found[factor] = [float(program(jnp.full(3, float(turn)))[0]) for turn in range(20)]

    # In opposite orders: each thread waits for its own program only.
    threads = [threading.Thread(target=work, args=(factor,)) for factor in ((1, 2) if hvd.rank() else (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@on_ranks(2, framework="jax")
def test_what_cannot_work_is_refused_when_it_is_traced() -> None:
    from horovod.errors import RequestError

    one, key = jnp.ones(()), jax.random.key(0)
    cases: list[tuple[Any, Any, str]] = [
        (hvd.allgather, one, "allgather of a tensor without dimensions"),
        (hvd.alltoall, one, "alltoall of a tensor without dimensions"),
        (hvd.reducescatter, one, "reducescatter of a tensor without dimensions"),
        (hvd.alltoall, jnp.ones(3), "alltoall of 3 rows to 2 ranks"),
        (hvd.allreduce, jnp.ones(2, bool), "Average of bool tensors is not defined"),
        (lambda x: hvd.broadcast(x, 7), one, "invalid root rank 7"),
        (hvd.allgather, key, r"allgather of a single random key \(the tensor\)"),
        (hvd.alltoall, key, "alltoall of a single random key"),
        *((hvd.allreduce, jnp.ones(2, dtype), f"type {dtype} is not supported") for dtype in ("float8_e5m2", "int4")),
    ]
    for function, value, text in cases:
        with pytest.raises(RequestError, match=rf"{text}.*test_among_others.py"):
            function(value)
        # At the call, before anything is compiled, so that the exception is our own.
        with pytest.raises(RequestError, match=rf"{text}.*test_among_others.py"):
            jax.eval_shape(lambda x, function=function: function(x), value)
    with pytest.raises(RequestError, match="single random key"):
        hvd.allgather_async(key)
    for value in (jnp.ones(2, "float8_e5m2"), jnp.ones(2, "int4"), key):
        got = hvd.broadcast_object({"value": value})["value"]
        assert got.dtype == value.dtype


@pytest.mark.slow
@on_ranks(2, framework="jax", fresh=True)
def test_a_script_that_ends_while_its_programs_are_under_way() -> None:
    hvd.init()
    step = jax.jit(lambda x: hvd.allreduce(x @ x / 300))
    x = jnp.ones((300, 300))
    for _ in range(20):
        x = step(x)
