"""Every collective x library x dtype x op x shape, over worlds of 1, 2, 3 and 5 ranks, against numpy.

Then the same over each engine between hosts, flat and together with shared memory; one job each does all of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from conformance import DTYPES, HOSTS, LARGE, allreduce, collectives, everything, in_64_bits
from conformance_jobs import between, on_a_paper_device
from harness import run_ranks
from overlapping import overlapping

#: TensorFlow and JAX have the kernels of numpy; what is their own is how arrays come in and go out.
SIZES = {"torch": [1, 2, 3, 5], "numpy": [1, 2, 3, 5], "tensorflow": [1, 3], "jax": [1, 3]}
JAX_DTYPES = ["bool", "int64", "bfloat16", "float32", "complex64"]


def _cases() -> list[Any]:
    """The product of libraries, dtypes and sizes, without what does not exist; a small part of it is quick."""
    cases = []
    for library, dtype in itertools.product(SIZES, DTYPES):
        if library == "numpy" and dtype == "bfloat16":
            continue  # numpy has no such dtype
        if library == "jax" and dtype not in JAX_DTYPES:
            continue
        for size in SIZES[library]:
            marks = [pytest.mark.quick] if dtype == "float32" and size == 2 else []
            cases.append(pytest.param(library, dtype, size, marks=marks, id=f"{library}-{dtype}-{size}"))
    return cases


def _run(size: int, function: Callable[..., None], library: str, *args: Any) -> None:
    if library == "jax":
        run_ranks(size, in_64_bits, function, library, *args, framework=library)
    else:
        run_ranks(size, function, library, *args, framework="torch" if library == "numpy" else library)


@pytest.mark.parametrize(("library", "dtype", "size"), _cases())
def test_every_collective(library: str, dtype: str, size: int) -> None:
    _run(size, collectives, library, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "size"), [("int8", 3), ("float16", 2), ("bfloat16", 3), ("float32", 2), ("float64", 3)]
)
def test_large_allreduce(dtype: str, size: int) -> None:
    _run(size, allreduce, "torch", dtype, "Average", LARGE)


@pytest.mark.slow
def test_flat_over_gloo() -> None:
    run_ranks(3, between, (), "gloo", False, init=False, env={"HOROVOD_CPU_OPERATIONS": "GLOO"})


@pytest.mark.slow
def test_tensors_of_a_device() -> None:
    """All that is NCCL's but NCCL itself, for which ``tests/torch/test_cuda.py`` needs a GPU."""
    run_ranks(3, on_a_paper_device, True, init=False)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_over_gloo(hosts: str) -> None:
    size = sum(map(len, HOSTS[hosts]))
    run_ranks(size, between, HOSTS[hosts], "shm and gloo", hosts == "2+2", init=False)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosts", [(4,), (2, 2), (3, 1), (1, 2, 1)], ids=lambda hosts: "+".join(map(str, hosts)))
def test_overlapping_process_sets(hosts: tuple[int, ...], seed: int) -> None:
    run_ranks(4, overlapping, seed, 150, hosts=hosts if len(hosts) > 1 else ())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_alone_on_their_hosts(size: int) -> None:
    """Small data travels with the requests."""
    run_ranks(size, everything, False, hosts=(1,) * size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.mpi(k)) for k in ("openmpi", "mpich")])
def test_flat_and_hosts_over_mpi(kind: str, mpirun: list[str]) -> None:
    folder = Path(mpirun[0]).parent.parent / "lib"
    script = f"import sys; sys.path[:0] = {sys.path!r}; import conformance_jobs; conformance_jobs.on_mpi()"
    code, output = run(
        [*mpirun, "-np", "4", sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        LD_LIBRARY_PATH=str(folder),
        MPI4PY_MPIABI=kind,
        OMP_NUM_THREADS="1",
        HOROVOD_START_TIMEOUT="500",
    )
    assert code == 0, output
    assert output.count("all of it is right") == 4, output
