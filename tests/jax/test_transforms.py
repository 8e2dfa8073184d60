"""JAX's transformations of the collectives: derivatives, batches, loops, branches; and that horovod.torch agrees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from later import later

hvd_torch, jax, jnp, torch = later("horovod.torch"), later("jax"), later("jax.numpy"), later("torch")

CASES: dict[str, Any] = {
    "average": lambda hvd, x: hvd.allreduce(x),
    "sum": lambda hvd, x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
    "max": lambda hvd, x: hvd.allreduce(x, op=hvd.Max),
    "min": lambda hvd, x: hvd.allreduce(x, op=hvd.Min, prescale_factor=2.0),
    "max with factors": lambda hvd, x: hvd.allreduce(x, op=hvd.Max, prescale_factor=0.3, postscale_factor=1.7),
    "product": lambda hvd, x: hvd.allreduce(x, op=hvd.Product),
    "adasum": lambda hvd, x: hvd.allreduce(x, op=hvd.Adasum),
    "group": lambda hvd, x: sum(hvd.grouped_allreduce([x, x * 2])),
    "allgather": lambda hvd, x: hvd.allgather(x),
    "broadcast": lambda hvd, x: hvd.broadcast(x, 1),
    "alltoall": lambda hvd, x: hvd.alltoall(x),
    "reducescatter": lambda hvd, x: hvd.reducescatter(x),
    "reducescatter of uneven rows": lambda hvd, x: hvd.reducescatter(x[:3], op=hvd.Sum),
    "name": lambda hvd, x: hvd.allreduce(x, name="x"),
}


@on_ranks(2, framework="jax")
def test_gradients_are_those_of_torch() -> None:
    import horovod.jax as hvd

    rank = hvd.rank()
    values = np.array([[0.5, 2.0], [0.0, 3.0], [-1.0, 4.0], [2.5, -3.0]], np.float32) * (1 + rank)
    for what, apply in CASES.items():
        tensor = torch.tensor(values, requires_grad=True)
        output = apply(hvd_torch, tensor)
        weights = np.arange(1.0, 1.0 + output.numel(), dtype=np.float32).reshape(output.shape) * (2 + rank)
        (output.square() * torch.tensor(weights)).sum().backward()

        def loss(x: Any, apply: Any = apply, weights: Any = weights) -> Any:
            return (jnp.square(apply(hvd, x)) * weights).sum()

        for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.jit(jax.grad(jax.checkpoint(loss)))):
            np.testing.assert_allclose(gradient(values), tensor.grad.numpy(), rtol=1e-5, err_msg=what)


@on_ranks(2, framework="jax")
def test_second_derivatives_are_the_same_in_programs() -> None:
    import horovod.jax as hvd

    values = jnp.array([[0.5, 2.0], [0.0, 3.0], [-1.0, 4.0], [2.5, -3.0]]) * (1 + hvd.rank())
    for what, apply in CASES.items():
        slope = jax.grad(lambda x, apply=apply: (apply(hvd, x) ** 3).sum())
        second = jax.grad(lambda x, slope=slope: (slope(x) ** 2).sum())
        np.testing.assert_allclose(jax.jit(second)(values), second(values), rtol=1e-5, err_msg=what)


@on_ranks(3, framework="jax")
def test_gradients_of_uneven_rows() -> None:
    import horovod.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    rows = np.arange(2.0 * (rank + 1), dtype=np.float32).reshape(-1, 2)
    tensor = torch.tensor(rows, requires_grad=True)
    hvd_torch.allgather(tensor).pow(3).sum().backward()
    got = jax.grad(lambda x: (hvd.allgather(x) ** 3).sum())(jnp.asarray(rows))
    np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-6)
    splits = [rank + 1] * size
    rows = np.arange(float(sum(splits)), dtype=np.float32)
    got = jax.grad(lambda x: ((hvd.alltoall(x, splits=splits)[0]) ** 3).sum())(jnp.asarray(rows))
    np.testing.assert_allclose(got, 3 * rows**2, rtol=1e-6)


@on_ranks(3, framework="jax")
def test_gradients_while_a_rank_has_joined() -> None:
    import horovod.jax as hvd

    rank = hvd.rank()
    if rank > 0:
        rows = np.arange(10.0, dtype=np.float32).reshape(5, 2) + rank
        for apply in (
            lambda hvd, x: hvd.allgather(x[rank:]),
            lambda hvd, x: sum(each.sum() for each in hvd.grouped_allgather([x**2, x[:rank] ** 2])),
            lambda hvd, x: hvd.reducescatter(x),
            lambda hvd, x: hvd.reducescatter(x, op=hvd.Sum),
        ):
            tensor = torch.tensor(rows, requires_grad=True)
            (apply(hvd_torch, tensor) ** 2 * (rank + 1)).sum().backward()
            got = jax.grad(lambda x, apply=apply: (apply(hvd, x) ** 2 * (rank + 1)).sum())(jnp.asarray(rows))
            np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-5)
    hvd.join()


@on_ranks(2, framework="jax")
def test_forward_mode_second_order_and_batches() -> None:
    import horovod.jax as hvd

    x = jnp.array([1.0, 2.0, 3.0]) + hvd.rank()
    mean = x - hvd.rank() + 0.5

    def f(x: Any) -> Any:
        return (hvd.allreduce(x) ** 3).sum()

    value, tangent = jax.jvp(f, (x,), (jnp.ones(3),))
    np.testing.assert_allclose(value, (mean**3).sum(), rtol=1e-6)
    np.testing.assert_allclose(tangent, (3 * mean**2).sum(), rtol=1e-6)
    for way in (lambda g: g, jax.jit):
        np.testing.assert_allclose(way(jax.jacfwd(f))(x), 3 * mean**2, rtol=1e-6)
        np.testing.assert_allclose(way(jax.hessian(f))(x), np.diag(6 * mean), rtol=1e-6)
        np.testing.assert_allclose(way(jax.grad(jax.checkpoint(f)))(x), 3 * mean**2, rtol=1e-6)
        batch = jnp.stack([x, 2 * x, 3 * x], axis=1)
        got = way(jax.vmap(lambda x: hvd.allreduce(x), in_axes=1, out_axes=1))(batch)
        np.testing.assert_allclose(got, np.stack([mean, 2 * mean, 3 * mean], axis=1), rtol=1e-6)
        assert way(jax.vmap(lambda x: hvd.allgather(x), in_axes=1))(batch).shape == (3, 6)
        per_example = way(jax.vmap(jax.grad(f), in_axes=1))(batch)
        np.testing.assert_allclose(per_example[1], 12 * mean**2, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="Adasum under vmap"):
        jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(jnp.ones((2, 2)))


@on_ranks(2, framework="jax")
def test_loops_and_branches() -> None:
    import horovod.jax as hvd

    rank = hvd.rank()
    x = jnp.array([1.0, 2.0]) + rank

    def body(carry: Any, scale: Any) -> tuple[Any, Any]:
        carry = hvd.allreduce(carry * scale, op=hvd.Sum)
        return carry, carry[0]

    last, trail = jax.jit(lambda x: jax.lax.scan(body, x, jnp.array([0.5, 1.0, 1.0])))(x)
    np.testing.assert_allclose(last, np.array([3.0, 5.0]) / 2 * 4)
    np.testing.assert_allclose(trail, [1.5, 3.0, 6.0])
    grad = jax.jit(jax.grad(lambda x: jax.lax.scan(body, x, jnp.array([0.5, 1.0, 1.0]))[0].sum()))(x)
    np.testing.assert_allclose(grad, [4.0, 4.0])
    # A result that depends on nothing that changes is still reduced in every turn.
    twice = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, total: total + hvd.allreduce(x, op=hvd.Sum), x * 0))
    np.testing.assert_allclose(twice(x), [9.0, 15.0])
    branch = jax.jit(lambda x, go: jax.lax.cond(go, lambda x: hvd.allreduce(x), lambda x: x, x))
    np.testing.assert_allclose(branch(x, True), [1.5, 2.5])
    np.testing.assert_allclose(branch(x, False), x)
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, hvd.allreduce(c[1])), (0, x)))
    np.testing.assert_allclose(loop(x)[1], [1.5, 2.5])
    with jax.disable_jit():
        np.testing.assert_allclose(jax.jit(lambda x: hvd.allreduce(x))(x), [1.5, 2.5])
    compiled = jax.jit(lambda x: hvd.allreduce(x)).lower(x).compile()
    np.testing.assert_allclose(compiled(x), [1.5, 2.5])


@on_ranks(3, framework="jax")
def test_two_calls_of_one_name_in_a_program_do_not_mix() -> None:
    """Two calls of one name, or of one line, in one program: each gets its own result and its own gradient."""
    import horovod.jax as hvd

    rank, size = hvd.rank(), hvd.size()

    def total(value: Any) -> Any:
        return sum(value(i) for i in range(size))

    def xs(i: int) -> Any:
        return np.arange(4, dtype=np.float32) + 10 * i

    def ys(i: int) -> Any:
        return np.arange(4, dtype=np.float32) * 100 + 1000 * i

    x, y, sum_x, sum_y = jnp.asarray(xs(rank)), jnp.asarray(ys(rank)), total(xs), total(ys)

    def named(value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Sum, name="one")

    def unnamed(value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Sum)

    for reduce in (named, jax.jit(unnamed)):

        def scan(x: Any, y: Any, _: Any, reduce: Any = reduce) -> Any:
            return jax.lax.scan(lambda sum, v: (sum + reduce(v), reduce(2 * v)), 0 * x, jnp.stack([x, y]))

        def cond(x: Any, y: Any, _: Any, reduce: Any = reduce) -> Any:
            return [jax.lax.cond(v[1] >= 0, reduce, lambda v: v, v) for v in (y, x)]

        def loss(x: Any, y: Any, place: Any, reduce: Any = reduce) -> Any:
            # As a number the rank makes another program of each rank, in which XLA may reorder functions.
            place = rank if reduce is named else place
            return ((1 + place) * reduce(x) + (5 + 3 * place) * reduce(y)).sum()

        def scanned_loss(x: Any, y: Any, place: Any, loss: Any = loss) -> Any:
            return jax.lax.scan(lambda sum, v: (sum + loss(v, 2 * v, place), None), 0.0, jnp.stack([x, y]))[0]

        grads = [total(lambda i: np.full(4, slope + rise * i, np.float32)) for slope, rise in ((1, 1), (5, 3))]
        both = grads[0] + 2 * grads[1]
        cases: list[tuple[Any, Any]] = [
            (lambda x, y, _, f=reduce: [f(y), f(x)], [sum_y, sum_x]),
            (scan, (sum_x + sum_y, np.stack([2 * sum_x, 2 * sum_y]))),
            (cond, [sum_y, sum_x]),
            (lambda x, y, _, f=reduce: [jax.vmap(f)(jnp.stack(v)) for v in ((x, y), (y, x))],
             [np.stack([sum_x, sum_y]), np.stack([sum_y, sum_x])]),
            (jax.grad(loss, (0, 1)), grads),
            (jax.grad(jax.checkpoint(loss), (0, 1)), grads),
            (jax.grad(scanned_loss, (0, 1)), [both, both]),
        ]  # fmt: skip
        for function, want in cases:
            for way in (function, jax.jit(function)):
                found = way(x, y, jnp.float32(rank))
                jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(want))


@on_ranks(3, framework="jax")
def test_programs_that_differ_in_a_constant_are_right_or_refused() -> None:
    """XLA may run the two calls in another order on each rank, so it depends on its version whether they meet."""
    import horovod.jax as hvd
    from horovod.errors import HorovodInternalError

    rank = hvd.rank()
    reduce = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))

    def loss(x: Any, y: Any) -> Any:
        return ((1 + rank) * reduce(x) + (5 + 3 * rank) * reduce(y)).sum()

    try:
        with hvd.typed_errors():
            found = jax.block_until_ready(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(jnp.ones(4), jnp.ones(4)))
    except HorovodInternalError as error:
        assert "The circle: rank" in str(error)
        return
    np.testing.assert_array_equal(found, [[6.0] * 4, [24.0] * 4])


@on_ranks(1, framework="jax")
def test_each_call_of_a_compiled_function_has_a_name_of_its_own() -> None:
    """JAX lowers a function once, and XLA may run its calls in another order on each rank."""
    import horovod.jax as hvd

    reduce = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    plain = jax.jit(lambda x: jnp.sin(x) + 1)

    def calls(x: Any) -> Any:
        return [reduce(x), plain(x), jax.lax.map(reduce, x), jax.lax.map(reduce, x), reduce(2 * x), plain(2 * x)]

    text = jax.jit(calls).lower(jnp.ones(3)).as_text()
    assert text.count("custom_call @xla") == 4
    assert text.count("stablehlo.sine") == 1


@on_ranks(2, framework="jax")
def test_one_branch_after_the_other() -> None:
    """JAX frees the function that it has lowered a branch in, and the next one may lie at the same address."""
    import horovod.jax as hvd

    def branches(x: Any) -> Any:
        for _ in range(4):
            x = jax.lax.cond(
                x[0] < 10,
                lambda x: hvd.allreduce(x) + hvd.allreduce(x * 2),
                lambda x: hvd.allreduce(x * 3) - hvd.allreduce(x),
                x,
            )
        return x

    x = jnp.ones(3) * (1.0 + hvd.rank())
    np.testing.assert_allclose(jax.jit(branches)(x), [54.0] * 3)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: branches(x).sum()))(x), [36.0] * 3)


@on_ranks(2, framework="jax")
def test_gradients_go_through_shard_map_over_one_device() -> None:
    from jax.sharding import Mesh, PartitionSpec

    import horovod.jax as hvd

    part = PartitionSpec("local")
    mesh = Mesh(np.array(jax.devices()[:1]), ("local",))
    x = jnp.arange(6.0).reshape(2, 3) + hvd.rank()
    for name in ("sum", "max", "allgather", "broadcast", "alltoall", "reducescatter"):

        def plain(x: Any, name: str = name) -> Any:
            return jnp.sin(CASES[name](hvd, x))

        mapped = jax.shard_map(plain, mesh=mesh, in_specs=part, out_specs=part)
        want = jax.grad(lambda x, f=plain: f(x).sum())(x)
        for way in (lambda f: f, jax.jit):
            np.testing.assert_allclose(way(jax.grad(lambda x, f=mapped: f(x).sum()))(x), want, rtol=1e-6)
