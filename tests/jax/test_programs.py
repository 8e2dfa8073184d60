"""How collectives stand in a compiled program: their names, their order, and the ways to get there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks
from jax_modes import names_submitted
from later import later

from horovod.errors import MismatchError

hvd, jax, jnp = later("horovod.jax"), later("jax"), later("jax.numpy")


@on_ranks(1, framework="jax")
def test_names_come_from_program_and_line_and_are_numbered() -> None:
    x = jnp.ones(3)

    def twice(x: Any) -> Any:
        return [hvd.allreduce(x) for _ in range(2)]

    @jax.jit
    def program(x: Any) -> Any:
        first = twice(x)
        named = hvd.allreduce(x, name="mine"), hvd.allreduce(x, name="mine")
        return first, named, hvd.broadcast([x, x], 0), hvd.allgather(x)

    first = twice.__code__.co_firstlineno + 1
    line = program.__wrapped__.__code__.co_firstlineno + 4
    want = [
        f"allreduce.program/test_programs.py:{first}",
        f"allreduce.program/test_programs.py:{first}#2",
        "allreduce.mine",
        "allreduce.mine#2",
        f"broadcast.program/test_programs.py:{line}.0",
        f"broadcast.program/test_programs.py:{line}.1",
        f"allgather.program/test_programs.py:{line}",
    ]
    found = names_submitted(program, x)
    assert found == want, "\n".join(found)
    # Traced anew, for another shape, it has the same names.
    assert names_submitted(program, jnp.ones(5)) == names_submitted(program, x)
    gradient = jax.jit(jax.grad(lambda x: hvd.allreduce(x, name="loss").sum()))
    assert names_submitted(gradient, x) in (["allreduce.loss", "allreduce.loss.gradient"], ["allreduce.loss.gradient"])
    # A compiled program holds nothing of what it was compiled from.
    unused = jax.jit(lambda x: (hvd.allreduce(x), x)[1])
    assert names_submitted(unused, x) == []


def _order() -> list[str]:
    def program(x: Any) -> Any:
        found = []
        for i in range(8):
            # Cheap and costly, wide and narrow operations would be scheduled in another order; and here on each rank.
            size = 1 + (i * 7 + 5 * hvd.rank()) % 11
            y = jnp.sin(x[:size]).sum() if (i + hvd.rank()) % 2 else x[0] * size
            found.append(hvd.allreduce(y, name=f"part{i}"))
        return found[::-1]

    def nested(x: Any) -> Any:
        inner = jax.jit(lambda x: (x * 2, hvd.allreduce(x.sum(), name="inner")))
        doubled, total = jax.jit(inner)(x)
        loop = jax.lax.fori_loop(0, 2, lambda i, y: y + hvd.allreduce(x, name="loop"), x)
        branch = jax.lax.cond(x[1] > 0, lambda x: hvd.allreduce(x, name="branch"), lambda x: x, x)
        size = 1 + 5 * hvd.rank()
        last = hvd.allreduce(jnp.sin(x[:size]).sum(), name="last")
        return last, branch.sum(), loop.sum(), doubled, total

    names = names_submitted(jax.jit(nested), jnp.arange(100.0))
    assert names.index("allreduce.last") == len(names) - 1 == 4
    return names_submitted(jax.jit(program), jnp.arange(100.0))


@pytest.mark.parametrize("way", ["_directly", "_through_arrays"])
@on_ranks(3, framework="jax")
def test_calls_run_in_the_order_of_the_trace_on_ranks_whose_programs_differ(way: str) -> None:
    from horovod.jax import lowering

    lowering.register(getattr(lowering, way))
    try:
        assert _order() == [f"allreduce.part{i}" for i in range(8)]
    finally:
        lowering.register()


@pytest.mark.parametrize("way", ["_directly", "_through_arrays"])
@on_ranks(2, framework="jax")
def test_each_way_into_a_program(way: str) -> None:
    from horovod.jax import lowering

    lowering.register(getattr(lowering, way))
    try:
        rank, size = hvd.rank(), hvd.size()
        x = jnp.arange(4.0) + rank

        def body(x: Any, _: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum) / size, None

        @jax.jit
        def program(x: Any) -> Any:
            both = hvd.allreduce([x, x.astype(jnp.bfloat16)], op=hvd.Sum)
            grad = jax.grad(lambda x: (hvd.allgather(x) ** 2).sum())(x)
            return both, grad, jax.lax.scan(body, x, None, length=3)[0], hvd.broadcast(x, 1), hvd.alltoall(x)

        both, grad, looped, sent, swapped = program(x)
        np.testing.assert_allclose(both[0], np.arange(4.0) * 2 + 1)
        assert both[1].dtype == jnp.bfloat16
        np.testing.assert_allclose(grad, 2 * x)
        np.testing.assert_allclose(looped, np.arange(4.0) + 0.5)
        np.testing.assert_allclose(sent, np.arange(4.0) + 1)
        np.testing.assert_allclose(swapped, [2 * rank, 2 * rank + 1, 2 * rank + 1, 2 * rank + 2])
        with pytest.raises(MismatchError), hvd.typed_errors():
            jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(2 + rank)))
    finally:
        lowering.register()


def _kept_on_disk(folder: str, values: list[float]) -> list[float]:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    try:
        found = []
        for value in values:
            jax.clear_caches()
            program = jax.jit(lambda x: (hvd.allreduce(x * 2, op=hvd.Sum), hvd.allreduce(x, op=hvd.Max)))
            found.append(float(program(jnp.full(3, value + hvd.rank()))[0][0]))
        return found
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_programs_that_jax_keeps_on_disk(tmp_path: Any) -> None:
    for _ in range(2):
        assert run_ranks(2, _kept_on_disk, str(tmp_path), [1.0, 2.0], framework="jax") == [[6.0, 10.0]] * 2


def _another_world() -> float:
    # The same function in a job of another size, as in a notebook: what was compiled for the old one does not fit.
    global _program
    hvd.init()
    if "_program" not in globals():
        _program = jax.jit(lambda x: hvd.allgather(x).sum())
    return float(_program(jnp.ones(2)))


def test_a_program_of_a_job_of_another_size_is_compiled_anew() -> None:
    def both() -> list[float]:
        found = [_another_world()]
        hvd.shutdown()
        for name in ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"):
            os.environ[name] = "1"
        os.environ["HOROVOD_RANK"] = os.environ["HOROVOD_LOCAL_RANK"] = "0"
        os.environ["HOROVOD_JOB_ID"] += f"-{os.getpid()}"
        return [*found, _another_world()]

    assert run_ranks(2, both, init=False, framework="jax") == [[4.0, 2.0]] * 2


@on_ranks(1, init=False, framework="jax")
def test_results_are_made_where_xla_wants_them() -> None:
    from horovod.jax.calls import _Into

    ours = np.empty(2, np.float32)
    into = _Into([ours, ours])
    assert into.empty((2,), "float32", None) is ours
    assert into.empty((1,), "float32", None).shape == (1,)
    assert not hasattr(into, "over"), "the engine would make the result in memory of its own, to be copied"
