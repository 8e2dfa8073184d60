"""Which engine moves tensors between hosts, and what is said where there is none; which ranks share a host."""

from __future__ import annotations

import pytest

from horovod.config import load
from horovod.errors import InitError
from horovod.transports.selection import choose, wants_nccl
from horovod.transports.topology import Topology

ALL = frozenset({"gloo", "mpi", "nccl"})


def _choose(launcher: str = "horovodrun", several: bool = True, there: frozenset[str] = ALL, **environ: str) -> str:
    found = choose(load({f"HOROVOD_{name}": value for name, value in environ.items()}), launcher, several, there)
    return "" if found is None else f"{found.engine} {'hierarchical' if found.is_hierarchical else 'flat'}"


@pytest.mark.parametrize(
    ("launcher", "several", "environ", "found"),
    [
        ("horovodrun", True, {}, "gloo hierarchical"),
        ("torchrun", True, {}, "gloo hierarchical"),
        ("openmpi", True, {}, "mpi hierarchical"),
        ("mpich", True, {}, "mpi hierarchical"),
        ("openmpi", True, {"CPU_OPERATIONS": "GLOO"}, "gloo hierarchical"),
        ("openmpi", True, {"CONTROLLER": "gloo"}, "gloo hierarchical"),
        ("horovodrun", True, {"CONTROLLER": "mpi"}, "mpi hierarchical"),
        ("horovodrun", True, {"CONTROLLER": "mpi", "CPU_OPERATIONS": "gloo"}, "gloo hierarchical"),
        ("horovodrun", True, {"HIERARCHICAL_ALLREDUCE": "0"}, "gloo flat"),
        ("horovodrun", False, {}, ""),
        ("openmpi", False, {"CONTROLLER": "mpi"}, ""),
        ("openmpi", False, {"CPU_OPERATIONS": "MPI"}, "mpi flat"),
        ("horovodrun", False, {"CPU_OPERATIONS": "gloo"}, "gloo flat"),
    ],
)
def test_the_engine(launcher: str, several: bool, environ: dict[str, str], found: str) -> None:
    assert _choose(launcher, several, **environ) == found


def test_tensors_of_a_gpu_may_have_an_engine_of_their_own() -> None:
    for asked, engines in (("", "gloo gloo"), ("NCCL", "gloo gloo"), ("MPI", "gloo mpi")):
        settings = load({"HOROVOD_GPU_OPERATIONS": asked})
        found = choose(settings, "horovodrun", True, ALL)
        assert f"{found.engine} {found.device_engine}" == engines
        assert ("those of a GPU over mpi" in str(found)) == (asked == "MPI")
        assert wants_nccl(settings, ALL) == (asked == "NCCL")


def test_nccl_comes_with_torch() -> None:
    with pytest.raises(InitError, match="HOROVOD_GPU_OPERATIONS=NCCL needs torch, which is not installed here"):
        wants_nccl(load({"HOROVOD_GPU_OPERATIONS": "NCCL"}), frozenset({"mpi"}))


def test_without_mpi4py_mpirun_gets_gloo() -> None:
    assert _choose("openmpi", there=frozenset({"gloo"})) == "gloo hierarchical"


@pytest.mark.parametrize(
    ("launcher", "environ", "text"),
    [
        ("horovodrun", {}, r"neither torch \(for Gloo\) nor mpi4py: pip install torch on all hosts"),
        ("openmpi", {}, r"pip install 'khorovod\[mpi\]' on all hosts"),
        ("horovodrun", {"CPU_OPERATIONS": "gloo"}, r"HOROVOD_CPU_OPERATIONS=gloo needs torch, .* pip install 'torch'"),
        ("horovodrun", {"CONTROLLER": "mpi"}, r"HOROVOD_CONTROLLER=mpi needs mpi4py, .* 'khorovod\[mpi\]'"),
    ],
)
def test_what_is_missing_is_said_with_the_remedy(launcher: str, environ: dict[str, str], text: str) -> None:
    with pytest.raises(InitError, match=text):
        _choose(launcher, there=frozenset(), **environ)


def test_a_topology_knows_the_hosts_of_some_ranks() -> None:
    topology = Topology(3, ((0, 1, 4), (2, 3), (5,)))
    assert (topology.size, topology.mine) == (6, (2, 3))
    assert topology.hosts_of((1, 2, 3, 4)) == ((1, 4), (2, 3))
    assert topology.hosts_of((0, 4)) == ((0, 4),)
    assert topology.flat() == Topology(3, ((0,), (1,), (2,), (3,), (4,), (5,)))
