"""Tensors of a GPU where the engine decides: kinds of views, groups, process sets, joins, stalls, ends of a job."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from harness import on_ranks, run_ranks

import horovod.torch as hvd
from horovod import errors

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.slow,
]

WAYS = pytest.mark.parametrize("env", [{}, {"HOROVOD_GPU_OPERATIONS": "NCCL"}], ids=["host memory", "nccl"])


def as_on_several_hosts() -> None:
    """See ``on_cuda`` in ``conformance_jobs``."""
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"rank-{os.environ['HOROVOD_RANK']}", "lo"
    hvd.init()


@WAYS
@on_ranks(2, init=False, given=["env"])
def test_lazy_views_groups_of_several_dtypes_and_process_sets() -> None:
    as_on_several_hosts()
    rank, size = hvd.rank(), hvd.size()
    for count in (4, 64 << 10):
        real, imaginary = torch.arange(count, device="cuda").float(), torch.full((count,), rank + 1.0, device="cuda")
        lazy = torch.complex(real, imaginary).conj()
        total = torch.complex(real * size, torch.full_like(real, -size * (size + 1) / 2))
        assert lazy.is_conj()
        assert torch.equal(hvd.allreduce(lazy, op=hvd.Sum), total)
        assert torch.equal(hvd.reducescatter(lazy, op=hvd.Sum), total.chunk(size)[rank])
        assert torch.equal(hvd.allgather(lazy).imag[::count].cpu(), -torch.arange(1.0, size + 1))
        assert torch.equal(hvd.broadcast(lazy, 1).imag, torch.full_like(real, -2.0))
        assert hvd.allreduce_(lazy, op=hvd.Sum) is lazy
        assert torch.equal(lazy, total)
        negative = torch._neg_view(imaginary)
        assert torch.equal(hvd.reducescatter(negative, op=hvd.Sum), total.imag.chunk(size)[rank])
        assert torch.equal(hvd.alltoall(negative).cpu(), -torch.arange(1.0, size + 1).repeat_interleave(count // size))
        hvd.grouped_allreduce_([negative, torch.ones(1, device="cuda")], op=hvd.Sum)
        assert torch.equal(negative, total.imag)
        assert torch.equal(imaginary, -total.imag)
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.int16, torch.bool, torch.float32]
        many = [torch.full((count + i,), rank, device="cuda").to(dtype) for i, dtype in enumerate(dtypes)]
        for i, found in enumerate(hvd.grouped_allreduce(many, op=hvd.Sum)):
            assert found.dtype is dtypes[i]
            assert found.device.type == "cuda"
            assert torch.equal(found, torch.full((count + i,), sum(range(size)), device="cuda").to(dtypes[i]))
        for i, found in enumerate(hvd.grouped_allgather(many)):
            assert found.dtype is dtypes[i]
            assert found[:: count + i].double().tolist() == [0.0, 1.0]
    sets = [hvd.add_process_set([member]) for member in range(size)]
    ones = torch.ones(1 << 20, device="cuda")
    handles = [hvd.allreduce_async(ones, op=hvd.Sum, process_set=one) for one in (sets[rank], hvd.global_process_set)]
    assert (hvd.synchronize(handles[0]) == 1).all()
    assert (hvd.synchronize(handles[1]) == size).all()
    assert all(hvd.remove_process_set(one) for one in sets)
    assert (hvd.allreduce(ones, op=hvd.Sum) == size).all()


def uneven() -> list[float]:
    as_on_several_hosts()
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).to("cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    batches = [torch.full((4, 3), hvd.rank() + 1.0, device="cuda")] * (2 + hvd.rank())
    with hvd.uneven_inputs(net, optimizer):
        for batch in batches:
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
    if hvd.rank() == 0:
        assert hvd.allreduce(torch.ones(5, device="cuda"), op=hvd.Sum).tolist() == [1.0] * 5
    assert hvd.join() == 0
    return net.weight.flatten().tolist()


@WAYS
def test_ranks_with_fewer_batches_end_with_the_weights_of_the_others(env: dict[str, str]) -> None:
    first, second = run_ranks(2, uneven, init=False, env=env)
    assert first == second


def stalls() -> str:
    as_on_several_hosts()
    tensor = torch.ones(1 << 20, device="cuda")
    hvd.allreduce(tensor, name="warm")
    if hvd.rank() == 1:
        with pytest.raises(errors.HorovodInternalError):
            hvd.allreduce(tensor, name="other")
        return ""
    with pytest.raises(errors.HorovodInternalError) as caught:
        hvd.allreduce(tensor, name="missing")
    assert (tensor * 2).sum().item() == 2 << 20
    return str(caught.value)


@WAYS
def test_a_tensor_that_a_rank_never_submits_is_named(env: dict[str, str]) -> None:
    first, _ = run_ranks(2, stalls, init=False, env={**env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"})
    assert "missing" in first
    assert "rank 1" in first


@WAYS
@on_ranks(2, init=False, given=["env"])
def test_a_job_that_ends_with_operations_in_flight_begins_again() -> None:
    as_on_several_hosts()
    hvd.barrier()
    for _ in range(2):
        tensors = [torch.full((1 << 20,), float(i), device="cuda") for i in range(6)]
        handles = []
        with contextlib.suppress(errors.PeerLostError):  # rank 0 may have left by now
            for i, tensor in enumerate(tensors):
                handles.append(hvd.allreduce_async(tensor, name=f"x{i}", op=hvd.Sum))
        if hvd.rank() == 0:
            handles.append(hvd.allreduce_async(tensors[0], name="nobody else's"))
        hvd.shutdown()
        for i, handle in enumerate(handles):
            try:
                found = hvd.synchronize(handle)
            except errors.HorovodInternalError:
                continue
            assert i < len(tensors)
            assert (found == i * 2).all()
        hvd.init()
        assert (hvd.allreduce(torch.ones(1 << 20, device="cuda"), op=hvd.Sum) == hvd.size()).all()
