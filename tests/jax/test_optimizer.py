"""DistributedOptimizer: N ranks train as one process on the concatenated batch does, eagerly and in a program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks
from heard import heard
from jax_modes import with_64_bits
from later import later

hvd, jax, jnp, optax = later("horovod.jax"), later("jax"), later("jax.numpy"), later("optax")

STEPS = 6


def _train(optimizer: Any, jit: bool, inputs: Any, targets: Any, passes: int = 1) -> tuple[Any, Any]:
    """Train a small network on this rank's rows; the parameters and the optimizer's state after it."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "hidden": jax.random.normal(keys[0], (5, 7), jnp.float64),
        "out": {"kernel": jax.random.normal(keys[1], (7, 2), jnp.float64), "bias": jnp.zeros(2, jnp.float64)},
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        hidden = jnp.tanh(x @ params["hidden"])
        return ((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2).mean()

    # Eagerly, what is tested is the optimizer; the rest is the same either way.
    gradients = jax.grad(loss) if jit else jax.jit(jax.grad(loss))

    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    state = optimizer.init(params)
    for i in range(STEPS):
        for j in range(passes):
            rows = slice(j * len(inputs[i]) // passes, (j + 1) * len(inputs[i]) // passes)
            params, state = step(params, state, inputs[i][rows], targets[i][rows])
    return params, state


def _data() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(STEPS, 12, 5)), draw.normal(size=(STEPS, 12, 2))


@pytest.mark.parametrize("jit", [False, True])
@on_ranks(3, framework="jax")
def test_ranks_train_as_one_process_does_and_have_the_same_bits(jit: bool) -> None:
    inputs, targets = _data()
    mine = slice(hvd.rank() * 12 // hvd.size(), (hvd.rank() + 1) * 12 // hvd.size())
    found = []
    with with_64_bits():
        plain = [
            optax.adam(0.05),
            optax.chain(optax.clip(0.1), optax.sgd(0.1, momentum=0.9)),
        ]
        for optimizer in plain if jit else plain[:1]:
            alone, _ = _train(optimizer, True, inputs, targets)
            params, state = _train(hvd.DistributedOptimizer(optimizer), jit, inputs[:, mine], targets[:, mine])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), alone, params)
            assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))
            found.append(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)))
    assert hvd.allgather_object(found) == [found] * 3


@pytest.mark.parametrize("jit", [False, True])
@on_ranks(2, framework="jax")
def test_accumulated_gradients_travel_once_a_step(jit: bool) -> None:
    inputs, targets = _data()
    mine = slice(hvd.rank() * 6, hvd.rank() * 6 + 6)
    with with_64_bits():
        alone, _ = _train(optax.adam(0.05), True, inputs, targets)
        before = hvd.stats().operations
        optimizer = hvd.DistributedOptimizer(
            optax.adam(0.05), backward_passes_per_step=3, average_aggregated_gradients=True
        )
        params, state = _train(optimizer, jit, inputs[:, mine], targets[:, mine], passes=3)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), alone, params)
        assert hvd.stats().operations - before <= STEPS + 1  # and once the parameters
        assert state.count == 0
        # Horovod's default adds up.
        optimizer = hvd.DistributedOptimizer(optax.sgd(0.1 / 3), backward_passes_per_step=3)
        params, _ = _train(optimizer, jit, inputs[:, mine], targets[:, mine], passes=3)
        alone, _ = _train(optax.sgd(0.1), True, inputs, targets)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), alone, params)


@on_ranks(2, framework="jax")
def test_arguments_of_the_optimizer() -> None:
    from horovod.errors import RequestError

    rank = hvd.rank()
    grads = {"w": jnp.array([1.0, 3.0]) * (1 + rank), "frozen": None, "act": len}
    assert hvd.allreduce_gradients(grads)["act"] is len
    sets = [hvd.add_process_set([r]) for r in range(2)]
    cases = [
        ({"op": hvd.Sum}, [3.0, 9.0]),
        ({"compression": hvd.Compression.fp16}, [1.5, 4.5]),
        ({"gradient_predivide_factor": 4.0}, [1.5, 4.5]),
        ({"op": hvd.Adasum}, [1.5, 4.5]),
        ({"process_set": sets[rank]}, [1.0 + rank, 3.0 * (1 + rank)]),
        ({"process_set": sets[0]}, [1.0 + rank, 3.0 * (1 + rank)]),
    ]
    params = {"w": jnp.zeros(2)}
    for how, want in cases:
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), **how)
        for update in (optimizer.update, jax.jit(optimizer.update)):
            updates, _ = update({"w": grads["w"]}, optimizer.init(params))
            np.testing.assert_allclose(-updates["w"], want, rtol=1e-3, err_msg=str(how))
    hvd.barrier()  # when rank 0 leaves, all process sets end
    with pytest.raises(RequestError, match=r"backward_passes_per_step must be an integer, .* Received: 0 \(at "):
        hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="must be a ProcessSet"):
        hvd.DistributedOptimizer(optax.sgd(0.1), process_set=[0, 1])
    with pytest.raises(RequestError, match=r"compression must have compress\(\) .* Received: 'fp16'"):
        hvd.DistributedOptimizer(optax.sgd(0.1), compression="fp16")
    with pytest.raises(RequestError, match="gradient_predivide_factor needs op=Average"):
        hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum, gradient_predivide_factor=2.0)
    for wrong, told in ((optax.sgd, "sgd, not called"), (0.1, "float")):
        with pytest.raises(RequestError, match=f"optimizer must be a transformation of optax.* Received: {told}"):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(RequestError, match="a DistributedOptimizer already"):  # a Sum would be summed again
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=2))


def _without_broadcast(jit: bool) -> list[str]:
    with heard() as said:
        params = {"same": jnp.ones(3), "layer": {"w": jnp.ones(2) * hvd.rank()}}
        optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
        update = jax.jit(optimizer.update) if jit else optimizer.update
        for _ in range(3):
            updates, _ = update(params, optimizer.init(params), params)
        jax.block_until_ready(updates)
    return said


@pytest.mark.parametrize("jit", [False, True])
def test_a_missing_broadcast_is_found_in_the_first_step(jit: bool) -> None:
    first, *others = run_ranks(3, _without_broadcast, jit, framework="jax")
    assert [text for text in first if "different models" in text] == [
        "the ranks train different models: ['layer']['w'] began this step with other values on rank 1, rank 2. Call "
        "hvd.broadcast_parameters(params, root_rank=0) before the first step"
    ]
    assert not any(others)
