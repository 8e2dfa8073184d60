"""Random collectives, in another order on every rank, against numpy."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_ranks
from plans import Step, expected, make_plan, splits, values

TOLERANCE = {"float16": 1e-3, "float32": 1e-6, "complex64": 1e-6}
#: Steps that are under way at once.
BLOCK = 40


class Library:
    """The collectives of numpy, or of torch for the same arrays in the memory of a device."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        import torch

        import horovod.numpy
        from horovod.bindings.collectives import Collectives
        from horovod.torch.adapter import TorchAdapter

        self.hvd: Any = horovod.numpy if name == "numpy" else Collectives(TorchAdapter())
        self.wrap: Any = np.asarray if name == "numpy" else lambda array: torch.from_numpy(array).to(device)

    def arena(self, array: Any) -> Any:
        home = self.hvd.zeros(array.shape, dtype=str(array.dtype))
        home[...] = self.wrap(array)
        return home


def _host_array(tensor: Any) -> Any:
    return tensor if isinstance(tensor, np.ndarray) else tensor.cpu().numpy()


def _begin(library: Library, step: Step, member: int, process_set: Any, ops: Any) -> tuple[Any, list[Any]]:
    """Begin a step; return its handle, or its result when it is a synchronous one, and the inputs."""
    inputs = [values(step, member, tensor) for tensor in range(len(step.shapes))]
    in_arena = step.where == "arena" and step.kind.endswith("_")
    tensors = [library.arena(array) if in_arena else library.wrap(array) for array in inputs]
    how: dict[str, Any] = {"process_set": process_set}
    if not step.unnamed:
        how["name"] = f"step{step.number}"
    if step.kind in ("allreduce", "allreduce_", "grouped", "reducescatter"):
        how["op"] = getattr(ops, step.op)
    elif step.kind in ("broadcast", "broadcast_"):
        how["root_rank"] = step.group[step.root]
    elif step.kind == "alltoall":
        how["splits"] = splits(step, member)
    name = "grouped_allreduce" if step.kind == "grouped" else step.kind.removesuffix("_")
    name += ("" if step.unnamed else "_async") + ("_" if step.kind.endswith("_") else "")
    given = tensors if step.kind == "grouped" else tensors[0]
    return getattr(library.hvd, name)(given, **how), tensors


def _check(step: Step, member: int, result: Any, tensors: list[Any]) -> None:
    if step.kind == "alltoall":
        result, received = result
        assert received.tolist() == [splits(step, other)[member] for other in range(len(step.group))]
    results = list(result) if step.kind == "grouped" else [result]
    tolerance = TOLERANCE.get(step.dtype, 0.0) if step.op == "Average" else 0.0
    for got, want in zip(map(_host_array, results), expected(step, member), strict=True):
        assert (got.dtype, got.shape) == (step.dtype, want.shape), step
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=str(step))
    if step.kind.endswith("_"):
        assert results[0] is tensors[0]
    else:
        for tensor, array in enumerate(tensors):
            np.testing.assert_array_equal(_host_array(array), values(step, member, tensor), err_msg=f"input of {step}")


def _work(seed: int, length: int, device: str) -> int:
    import horovod.numpy as hvd

    # NCCL refuses two ranks of a host on one GPU, and believes this.
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"rank-{os.environ['HOROVOD_RANK']}", "lo"
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    rng = random.Random(seed * 1000 + rank)
    # The same step is on a GPU on all ranks, or on none.
    libraries = [Library("numpy"), Library("torch")] if device == "cpu" else [Library("torch", device)]
    everybody = tuple(range(size))
    parts = [(0,), (1,)] if size == 2 else [everybody[1:], everybody[::2], everybody[-1:]]
    sets = {everybody: hvd.global_process_set, **{part: hvd.add_process_set(part) for part in parts}}
    plan = make_plan(seed, length, size, [everybody, everybody, *parts])
    done = 0
    for start in range(0, length, BLOCK):
        block = [step for step in plan[start : start + BLOCK] if rank in step.group]
        named = [step for step in block if not step.unnamed]
        rng.shuffle(named)
        begun = []
        for step in named:
            member = step.group.index(rank)
            library = rng.choice(libraries)
            begun.append((step, library, *_begin(library, step, member, sets[step.group], hvd)))
        for step in [step for step in block if step.unnamed]:
            if step.kind == "barrier":
                hvd.barrier(process_set=sets[step.group])
            else:
                member = step.group.index(rank)
                _check(step, member, *_begin(rng.choice(libraries), step, member, sets[step.group], hvd))
        rng.shuffle(begun)
        for step, library, handle, tensors in begun:
            _check(step, step.group.index(rank), library.hvd.synchronize(handle), tensors)
        done += len(block)
    # Rank 0 must not leave while the others still work in a set without it.
    hvd.barrier()
    return done


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(2,), (3,), (5,), (2, 2), (3, 1), (1, 1, 2)], ids=str)
def test_random_collectives(hosts: tuple[int, ...]) -> None:
    size = sum(hosts)
    counts = run_ranks(size, _work, size, 3_000 // size, "cpu", init=False, hosts=hosts if len(hosts) > 1 else ())
    assert min(counts) > 200


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hosts", [(2,), (3,), (3, 1)], ids=str)
@pytest.mark.parametrize("env", [{}, {"HOROVOD_GPU_OPERATIONS": "NCCL"}], ids=["host memory", "nccl"])
def test_random_collectives_of_a_gpu(hosts: tuple[int, ...], env: dict[str, str]) -> None:
    run_ranks(sum(hosts), _work, 7, 400, "cuda", init=False, hosts=hosts if len(hosts) > 1 else (), env=env)
