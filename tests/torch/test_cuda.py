"""The same on a GPU, which the ranks share, through host memory and over NCCL; left out where there is none."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from conformance import HOSTS
from conformance_jobs import on_cuda
from harness import Ranks, on_ranks, run_ranks

import horovod.torch as hvd
from horovod import errors

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.slow,
]


NCCL = {"HOROVOD_GPU_OPERATIONS": "NCCL"}


@pytest.mark.parametrize(
    ("size", "hosts", "env"),
    [
        pytest.param(1, "", {}, id="alone"),
        pytest.param(2, "", {}, id="host memory-2"),
        pytest.param(3, "", {}, id="host memory-3"),
        pytest.param(2, "", NCCL, id="nccl-2"),
        pytest.param(2, "1+1", NCCL, id="nccl-1+1"),
        pytest.param(4, "3+1", NCCL, id="nccl-3+1"),
    ],
)
def test_every_collective(size: int, hosts: str, env: dict[str, str]) -> None:
    run_ranks(size, on_cuda, HOSTS.get(hosts, ()), size < 3, init=False, env=env)


def _as_on_several_hosts() -> None:
    """See ``on_cuda``."""
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"rank-{os.environ['HOROVOD_RANK']}", "lo"
    hvd.init()


@pytest.mark.parametrize("env", [{}, NCCL], ids=["host memory", "nccl"])
@on_ranks(2, init=False, given=["env"])
def test_streams_and_memory_are_in_order() -> None:
    """Results are there for what any stream does next, and memory is not used again too early."""
    _as_on_several_hosts()
    rank, size = hvd.rank(), hvd.size()
    side = torch.cuda.Stream()
    for step in range(20):
        with torch.cuda.stream(side):
            busy = torch.randn(1024, 1024, device="cuda")
            for _ in range(5):
                busy = busy @ busy * 0.01
            tensor = torch.full((1 << 20,), float(rank + step), device="cuda").add_(1)
            found = hvd.allreduce(tensor, op=hvd.Sum) * 2
            handle = hvd.allreduce_async(torch.full((1 << 20,), float(step), device="cuda"), op=hvd.Sum)
            _ = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
            freed = hvd.synchronize(handle)
        side.synchronize()
        assert (found == 2 * (sum(range(size)) + size * (step + 1))).all()
        assert (freed == size * step).all()
    for step in range(20):
        results = [hvd.allreduce(torch.full((1 << 18,), float(step + i), device="cuda"), op=hvd.Sum) for i in range(4)]
        torch.cuda._sleep(20_000_000)  # cycles, in which what follows waits
        late = [result.clone() for result in results]
        del results  # their memory must not be used before
        for _ in range(4):
            hvd.allreduce(torch.full((1 << 18,), -1.0, device="cuda"), op=hvd.Sum)
        assert all((one == size * (step + i)).all() for i, one in enumerate(late)), step
    tied = torch.ones(10, device="cuda")
    assert [one.tolist() for one in hvd.grouped_allreduce_([tied, tied], op=hvd.Sum)] == [[size] * 10] * 2
    rows = torch.arange(12.0, device="cuda").reshape(3, 4).t()
    assert hvd.allreduce_(rows, op=hvd.Sum) is rows
    assert rows.cpu().equal(torch.arange(12.0).reshape(3, 4).t() * size)
    with pytest.raises(ValueError, match="expanded"):
        hvd.allreduce_(torch.ones(1, device="cuda").expand(4))
    with pytest.raises(RuntimeError, match=r"CUDA graph: move it out of torch\.cuda\.graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce(tied)
    with pytest.raises(RuntimeError, match="must be on one device, received cuda:0 and cpu"):
        hvd.grouped_allreduce([tied, tied.cpu()])
    with torch.inference_mode():
        assert (hvd.allreduce_(torch.ones(7, device="cuda"), op=hvd.Sum) == size).all()
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        assert (hvd.allreduce(torch.ones(1 << 20, device="cuda"), op=hvd.Sum) == size).all()


def _loses_one() -> str:
    _as_on_several_hosts()
    tensor = torch.ones(1 << 22, device="cuda")
    hvd.allreduce(tensor, name="warm")
    try:
        for step in range(1000):
            handles = [hvd.allreduce_async(tensor, name=f"x{i}") for i in range(5)]
            if hvd.rank() == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            for handle in handles:
                hvd.synchronize(handle)
    except errors.PeerLostError as error:
        # Nothing of the job holds up the GPU.
        return f"{error} {(tensor * 2).sum().item():g}"
    return "no error"


@pytest.mark.parametrize("env", [{}, NCCL], ids=["host memory", "nccl"])
def test_a_rank_that_is_killed_is_named_and_the_gpu_goes_on(env: dict[str, str]) -> None:
    first, second = Ranks(2, _loses_one, env=env, init=False).outcomes()
    assert second.exitcode == -signal.SIGKILL
    assert first.value is not None, first.text
    assert "rank 1" in first.value
    assert "was killed by SIGKILL" in first.value
    assert first.value.endswith(f" {2 << 22:g}")
    assert first.exitcode == 0


def _on_one_gpu() -> str:
    hvd.init()
    with pytest.raises(errors.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(3, device="cuda"))
    return str(caught.value)


def test_two_ranks_on_one_gpu_are_told_what_to_do() -> None:
    for outcome in Ranks(2, _on_one_gpu, env=NCCL, init=False).outcomes():
        assert outcome.value is not None, outcome.text
        assert "torch.cuda.set_device(hvd.local_rank())" in outcome.value


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).to("cuda", torch.float64)


def inputs(step: int, rank: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5 + rank, 6, generator=source, dtype=torch.float64).to("cuda")


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor, scale: float) -> None:
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    (net(x).square().sum() * scale).backward()
    optimizer.step()


def together() -> list[torch.Tensor]:
    _as_on_several_hosts()
    net = hvd.SyncBatchNorm.convert_sync_batchnorm(model())
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    for step in range(4):
        train(net, optimizer, step, inputs(step, hvd.rank()), 2 / 11)
    return [value.cpu() for value in net.state_dict().values()]


@pytest.mark.parametrize("env", [{}, NCCL], ids=["host memory", "nccl"])
def test_training_equals_one_process_on_all_the_data(env: dict[str, str]) -> None:
    first, second = run_ranks(2, together, init=False, env=env)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        train(net, optimizer, step, torch.cat([inputs(step, rank) for rank in range(2)]), 1 / 11)
    for ours, theirs, alone in zip(first, second, net.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, alone.cpu(), rtol=0, atol=1e-10)
        assert torch.equal(ours, theirs)


def state(options: dict[str, bool]) -> list[tuple[str, str]]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, **options)  # type: ignore[arg-type]
    if hvd.rank() == 0:
        net(inputs(0, 0)).sum().backward()
        optimizer.step()
    before = copy.deepcopy(net.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    return [
        (f"{name} on {value.device.type}", str(value.tolist()))
        for entry in optimizer.state_dict()["state"].values()
        for name, value in entry.items()
    ]


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_optimizer_state_goes_where_the_root_has_it(options: dict[str, bool]) -> None:
    first, second = run_ranks(2, state, options)
    assert first
    assert first == second


def scaled() -> tuple[float, list[float]]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).to("cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = net(torch.full((4, 3), float(hvd.rank() + 1), device="cuda")).sum()
        if step == 1 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), net.weight.flatten().tolist()


def test_grad_scaler_skips_the_same_steps() -> None:
    first, second = run_ranks(2, scaled)
    assert first == second
    assert first[0] == 32.0


def without_statistics() -> torch.nn.Module:
    """No gradient is zero but for rounding, of which Adam makes steps as large as any."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to("cuda", torch.float64)


def on_the_host(kind: str) -> tuple[list[torch.Tensor], set[str]]:
    def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
        if kind == "momentum":
            return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(net.parameters(), lr=0.01, fused=kind == "fused")

    _as_on_several_hosts()
    net = without_statistics()
    optimizer = hvd.DistributedOptimizer(optimizer_of(net), net.named_parameters(), host_optimizer=True)
    for step in range(3):
        train(net, optimizer, step, inputs(step, hvd.rank()), 2 / 11)
    # A checkpoint goes to a plain optimizer on the GPU, and from there to another one on the host.
    plain, whole = optimizer_of(net), hvd.broadcast_object(optimizer.state_dict(), 0)
    plain.load_state_dict(whole)
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), host_optimizer=True)
    train(net, optimizer, 3, inputs(3, hvd.rank()), 2 / 11)
    held = {value.device.type for state in optimizer._inner.state.values() for value in state.values()}
    return [parameter.detach().cpu() for parameter in net.parameters()], held


@pytest.mark.parametrize("kind", ["momentum", "adamw", "fused"])
def test_the_optimizer_on_the_host_equals_the_one_on_the_gpu(kind: str) -> None:
    first, second = run_ranks(2, on_the_host, kind, init=False)
    net = without_statistics()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if kind != "momentum":
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=kind == "fused")
    for step in range(4):
        train(net, optimizer, step, torch.cat([inputs(step, rank) for rank in range(2)]), 1 / 11)
    assert first[1] == second[1] == {"cpu"}
    for ours, theirs, alone in zip(first[0], second[0], net.parameters(), strict=True):
        torch.testing.assert_close(ours, alone.detach().cpu(), rtol=0, atol=1e-12)
        assert torch.equal(ours, theirs)
