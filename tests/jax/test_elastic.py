"""Elastic training in JAX: arrays that a step is given to write over, and programs that outlive a change of size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from by_hand import weights_by_hand
from elastic_job import ElasticJob
from harness import on_ranks

from horovod.core.membership_events import Policy


@pytest.mark.slow
@pytest.mark.parametrize("is_donated", [False, True])
@on_ranks(1, framework="jax")
def test_a_failed_step_has_no_effect(is_donated: bool) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from losing import losing

    import horovod.jax as hvd

    optimizer = hvd.DistributedOptimizer(optax.adam(0.1))

    def step(params: Any, opt_state: Any, key: Any, x: Any) -> Any:
        key, drawn = jax.random.split(key)
        noise = jax.random.normal(drawn, x.shape)
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"] + noise) ** 2))(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    compiled = jax.jit(step, donate_argnums=(0, 1, 2) if is_donated else ())
    x = np.random.default_rng(0).normal(size=(6, 8, 3)).astype("float32")

    @hvd.elastic.step
    def one(state: Any) -> None:
        state.params, state.opt_state, state.key, _ = compiled(
            state.params, state.opt_state, state.key, x[state.batch]
        )  # fmt: skip
        state.batch += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 3:
            one(state)
        if state.committed == 0:
            state.committed = 1
            state.commit()
        while state.batch < 6:  # undecorated: after a loss the commit is restored
            one.__wrapped__(state)

    def trained(which: tuple[int, ...]) -> Any:
        params = {"w": jnp.ones((3, 3)), "b": jnp.zeros(3)}
        state = hvd.elastic.JaxState(
            params=params, opt_state=optimizer.init(params), key=jax.random.key(3), batch=0, committed=0
        )
        with losing(which) as losses:
            train(state)
        assert losses.count == len(which)
        assert state.batch == 6
        return state._arrays(state._names)

    wanted = trained(())
    for value, other in zip(trained((1, 3, 7)), wanted, strict=True):
        np.testing.assert_array_equal(value, other)
    assert compiled._cache_size() == 1


def _train() -> dict[str, Any]:
    """Rank 1 dies in the fourth step, in a program that is given the weights to write over."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from losing import dying

    import horovod.jax as hvd

    hvd.init()
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    y = (x @ np.array([[1.0], [2.0], [3.0]])).astype("float32")
    traced: list[str] = []

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ weights - y) ** 2)

    def step(weights: Any, x: Any, y: Any) -> Any:
        traced.append("step")
        return weights - 0.1 * hvd.allreduce(jax.grad(loss)(weights, x, y), name="gradient")

    train_step = jax.jit(step, donate_argnums=0)

    @hvd.elastic.step
    def one(state: Any, batch: Any) -> None:
        state.weights = train_step(state.weights, *batch)
        state.sizes = [*state.sizes, hvd.size()]
        state.used = state.used + hvd.allreduce(jnp.asarray(batch[0][:, 0].sum()), op=hvd.Sum, name="used")

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.data.set_epoch(0)
        for batch in state.data:
            one(state, batch)

    data = hvd.elastic.shard((x, y), batch_size=4)
    state = hvd.elastic.JaxState(weights=jnp.zeros((3, 1)), used=jnp.zeros(()), data=data, sizes=[])
    with dying(7):
        train(state)
    return {
        "weights": np.asarray(state.weights), "used": float(state.used), "sizes": state.sizes, "traced": traced,
        "wanted": float(x[:, 0].sum()), "xy": (x, y),
    }  # fmt: skip


@pytest.mark.slow
def test_a_killed_rank_loses_no_sample_and_no_program() -> None:
    import numpy as np

    with ElasticJob(_train, Policy(3, minimum=2), {"a": 3}, framework="jax") as job:
        values = list(job.values().values())
    assert len(values) == 2
    for value in values:
        assert value["sizes"] == [3, 3, 3, 2, 2, 2]
        assert value["traced"] == ["step"]
        assert value["used"] == pytest.approx(value["wanted"], abs=1e-4)
    weights = weights_by_hand(*values[0]["xy"], values[0]["sizes"], [0.1])
    for value in values:
        np.testing.assert_allclose(value["weights"], weights, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@on_ranks(1, returns=[[["reduce"], [], ["divide"], ["divide", "reduce"]]], framework="jax")
def test_programs_are_traced_again_if_one_has_asked_for_the_size() -> list[list[str]]:
    """Two programs, of which the second asks for the number of ranks; after each meeting both run again."""
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd
    from horovod import context
    from horovod.bindings import process_sets

    traced: list[str] = []

    def reduce(x: Any) -> Any:
        traced.append("reduce")
        return hvd.allreduce(x, name="x")

    def divide(x: Any) -> Any:
        traced.append("divide")
        return x / hvd.size()

    found = []
    programs = [jax.jit(reduce)]
    with pytest.MonkeyPatch.context() as patch:
        world = context.world()
        for size in (1, 2, 2, 3):
            patch.setattr(context, "world", lambda size=size: dataclasses.replace(world, size=size))
            for function in process_sets._at_init:
                function()
            traced.clear()
            for program in programs:
                program(jnp.ones(2))
            found.append(sorted(traced))
            if len(programs) == 1 and size == 2:
                programs.append(jax.jit(divide))
    return found


@on_ranks(1, framework="jax")
def test_a_checkpoint_gives_each_tree_its_own_arrays() -> None:
    """Names not in the order of the alphabet, and arrays of one shape, so that only their order tells them apart."""
    import tempfile

    import jax
    import jax.numpy as jnp
    import numpy as np

    import horovod.jax as hvd
    from horovod.bindings.elastic import checkpoint

    def state(first: int) -> Any:
        params = {"w": jnp.full((2, 3), 1.0 * first, jnp.bfloat16), "b": 2.0 * first}
        trace = {"w": jnp.full((2, 3), 3.0 * first, jnp.bfloat16), "b": jnp.float32(4 * first)}
        return hvd.elastic.JaxState(params=params, opt_state=trace, key=jax.random.key(first), batch=first)

    with tempfile.TemporaryDirectory() as folder:
        values = checkpoint.read(checkpoint.write(folder, 1, state(1).checkpoint()))
    found, wanted = state(7), state(1)
    found.load_checkpoint(values)
    assert found.batch == 1
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(wanted, name))
    np.testing.assert_array_equal(jax.random.key_data(found.key), jax.random.key_data(wanted.key))
