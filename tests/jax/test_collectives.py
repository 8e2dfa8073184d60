"""The collectives of horovod.jax, eagerly and inside compiled programs: same results, whatever holds the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from jax_modes import with_64_bits
from later import later

hvd, jax, jnp = later("horovod.jax"), later("jax"), later("jax.numpy")
hvd_numpy = later("horovod.numpy")


def _both_ways(function: Any, *args: Any) -> list[Any]:
    # A function of its own: JAX remembers what it compiled for one, also when this process is a rank of another job.
    return [function(*args), jax.jit(lambda *args: function(*args))(*args)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks(framework="jax")
def test_each_collective_eagerly_and_in_a_program() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = jnp.arange(6.0).reshape(6, 1) + 10 * rank
    whole = np.stack([np.arange(6.0).reshape(6, 1) + 10 * r for r in range(size)])
    for got in _both_ways(hvd.allreduce, x):
        np.testing.assert_allclose(got, whole.mean(0))
    for got in _both_ways(lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0), x):
        np.testing.assert_allclose(got, 2 * whole.max(0))
    for got in _both_ways(hvd.allgather, x):
        np.testing.assert_allclose(got, whole.reshape(-1, 1))
    for got in _both_ways(lambda x: hvd.broadcast(x, root_rank=size - 1), x):
        np.testing.assert_allclose(got, whole[-1])
    share = 6 // size
    for got in _both_ways(hvd.alltoall, x):
        np.testing.assert_allclose(got, whole[:, rank * share : (rank + 1) * share].reshape(-1, 1))
    for got in _both_ways(lambda x: hvd.reducescatter(x, op=hvd.Sum), x):
        np.testing.assert_allclose(got, whole.sum(0)[rank * share : (rank + 1) * share])
    for got in _both_ways(lambda x: hvd.reducescatter(jnp.concatenate([x, x[:1]]), op=hvd.Sum), x):
        rows = (7 + size - 1 - rank) // size
        assert got.shape == (rows, 1)
    hvd.barrier()


@on_ranks(1, framework="jax", returns=[0])
def test_lengths_that_vary_compile_nothing_that_would_stay() -> int:
    compiled: list[str] = []

    def note(event: str, _: float, **__: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for length in range(100, 160):
            x = jax.device_put(np.ones(length, np.float32))
            assert hvd.allreduce(x).shape == hvd.broadcast(x, root_rank=0).shape == (length,)
        unusual = len(compiled)
        jax.jit(lambda x: x + 1)(x)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(compiled) > unusual, "what is compiled is not seen here"
    return unusual


@on_ranks(1, framework="jax")
def test_a_list_of_handles_is_refused() -> None:
    for module, value in ((hvd, jnp.ones(1)), (hvd_numpy, np.ones(1))):
        handles = [module.allreduce_async(value)]
        for function in (module.poll, module.synchronize):
            with pytest.raises(ValueError, match=r"expected the handle of one operation\. Received: list"):
                function(handles)
        np.testing.assert_array_equal(module.synchronize(handles[0]), value)


@on_ranks(3, framework="jax")
def test_numbers_of_rows_may_differ_eagerly() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = jnp.full((rank, 2), rank, jnp.int32)
    want = np.concatenate([np.full((r, 2), r) for r in range(size)])
    np.testing.assert_array_equal(hvd.allgather(rows), want)
    np.testing.assert_array_equal(hvd.synchronize(hvd.allgather_async({"a": rows}))["a"], want)
    splits = [rank + 1] * size
    output, received = hvd.alltoall(jnp.full((sum(splits),), float(rank)), splits=splits)
    np.testing.assert_array_equal(output, np.concatenate([np.full(r + 1, float(r)) for r in range(size)]))
    assert list(received) == [r + 1 for r in range(size)]
    handle = hvd.alltoall_async(jnp.full((sum(splits),), float(rank)), splits)
    again, received = hvd.synchronize(handle)
    np.testing.assert_array_equal(again, output)
    assert list(received) == [r + 1 for r in range(size)]


@on_ranks(2, framework="jax")
def test_pytrees_travel_as_one_and_other_leaves_stay() -> None:
    rank = hvd.rank()
    tree = {"w": jnp.ones((2, 2)) * rank, "n": np.int32(rank), "f": len, "none": None, "float": 2.0 * rank}

    def reduce(tree: Any) -> Any:
        return hvd.allreduce(tree, op=hvd.Sum)

    for got in (reduce(tree), hvd.synchronize(hvd.allreduce_async(tree, op=hvd.Sum))):
        assert got["f"] is len
        assert got["none"] is None
        assert (got["n"], got["float"], got["w"].sum()) == (1, 2.0, 4.0)
        assert all(isinstance(got[key], jax.Array) for key in ("w", "n", "float"))
    arrays = {key: value for key, value in tree.items() if key != "f"}
    np.testing.assert_array_equal(jax.jit(reduce)(arrays)["w"], np.ones((2, 2)))
    pair = hvd.grouped_allreduce([jnp.ones(1), jnp.ones(2)])
    assert [x.shape for x in pair] == [(1,), (2,)]
    assert hvd.allreduce({}) == {}
    sent = hvd.broadcast_parameters({**tree, "float": 7.0 * (rank + 1)}, root_rank=1)
    assert (sent["n"], sent["float"], sent["f"]) == (1, 14.0, len)
    other = {"w": jnp.ones(2), **({"extra": jnp.ones(1)} if rank else {})}
    with pytest.raises(hvd.HorovodInternalError, match=r"only rank 1 has: \['extra'\]"):
        hvd.broadcast_parameters(other)
    with pytest.raises(TypeError, match="expected an array or a pytree of arrays, received builtin_function"):
        hvd.allreduce(len)


@on_ranks(2, framework="jax")
def test_numbers_are_broadcast_with_the_parameters() -> None:
    import flax.serialization

    rank = hvd.rank()
    numbers = [
        40 + rank,
        2**70 + rank,
        0.1 + rank,
        rank == 0,
        1j + rank,
        np.float64(0.1) + rank,
        np.int64(2**40 + rank),
    ]
    found = hvd.broadcast_parameters({"numbers": numbers, "none": None, "text": f"rank {rank}"}, root_rank=0)
    want = [40, 2**70, 0.1, True, 1j, np.float64(0.1), np.int64(2**40)]
    assert found == {"numbers": want, "none": None, "text": f"rank {rank}"}
    assert [type(number) for number in found["numbers"]] == [type(number) for number in want]
    assert hvd.broadcast_parameters(rank, root_rank=1) == 1
    # A rank that restores a checkpoint alone may have a number where the others have an array.
    for step in (0, jnp.zeros((), jnp.int32)):
        for saved in (40, jnp.full((), 40)):
            state = {"w": jnp.zeros(2), "step": step}
            if rank == 0:
                state = flax.serialization.from_bytes(
                    state, flax.serialization.to_bytes({"w": jnp.ones(2), "step": saved})
                )
            state = hvd.broadcast_parameters(state)
            assert int(state["step"]) == 40
            assert isinstance(state["step"], int if isinstance(saved, int) else jax.Array)
            np.testing.assert_array_equal(state["w"], np.ones(2))
    with pytest.raises(hvd.HorovodInternalError, match=r"only rank 0 has: \['step'\], a scalar[^?]*flax.serialization"):
        hvd.broadcast_parameters({"step": jnp.zeros(1) if rank else 40})
    program = jax.jit(lambda x: hvd.broadcast_parameters({"x": x, "step": 40 + rank}, root_rank=1)["step"])
    assert program(jnp.ones(1)) == 41


@on_ranks(2, framework="jax")
def test_dtypes() -> None:
    names = ["bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64"]
    for name in names:
        x = jnp.array([0, 1, 1], dtype=name)
        want = x if name == "bool" else x * 2
        for got in _both_ways(lambda x: hvd.allreduce(x, op=hvd.Sum), x):
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(got.astype(want.dtype), want)
        for got in _both_ways(hvd.allgather, x):
            assert got.shape == (6,)
            assert got.dtype == x.dtype
    # Numpy's values of 64 bits become those that JAX makes of them.
    assert hvd.allreduce(np.ones(2)).dtype == jnp.float32
    with with_64_bits():
        for got in _both_ways(hvd.allreduce, jnp.ones(2, jnp.float64)):
            assert got.dtype == jnp.float64
    for empty in (jnp.zeros((0, 3)), jnp.zeros(())):
        for got in _both_ways(hvd.allreduce, empty):
            assert got.shape == empty.shape
    wire = hvd.Compression.bf16
    for got in _both_ways(lambda x: hvd.allreduce(x, compression=wire), jnp.full(3, 1.001)):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, np.ones(3))


@on_ranks(2, framework="jax")
def test_random_keys_are_broadcast_and_never_combined() -> None:
    rank = hvd.rank()
    for key in (jax.random.key(rank), jax.random.PRNGKey(rank), jax.random.key(rank, impl="rbg")):
        for got in _both_ways(lambda key: hvd.broadcast(key, 1), key):
            assert got.dtype == key.dtype
            want = jax.random.key(1, impl="rbg") if key.shape == () and "rbg" in str(key.dtype) else None
            if want is None:
                want = jax.random.key(1) if key.shape == () else jax.random.PRNGKey(1)
            np.testing.assert_array_equal(jax.random.uniform(got), jax.random.uniform(want))
    state = hvd.broadcast_parameters({"rng": jax.random.split(jax.random.key(rank), 3)}, 0)
    assert state["rng"].shape == (3,)
    with pytest.raises(ValueError, match=r"allreduce of random keys \(\['rng'\]\) is not defined"):
        hvd.allreduce(state)


@on_ranks(2, framework="jax")
def test_donated_buffers() -> None:
    step = jax.jit(lambda x: hvd.allreduce(x * 2), donate_argnums=0)
    x = jnp.arange(100_000.0)
    want = np.array(x)
    for _ in range(4):
        x = step(x)
        want = want * 2
    np.testing.assert_allclose(x, want)
    y = hvd.allreduce(x)
    kept = np.array(y)
    z = jax.jit(lambda y: y + 1, donate_argnums=0)(y)
    np.testing.assert_allclose(z, kept + 1)
    hvd.barrier()
