"""A default device other than the CPU concerns the script's own tensors, not ours."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks()
def test_the_default_device_does_not_matter() -> None:
    """With a default device on which nothing can be computed."""
    size = hvd.size()
    x = torch.ones(2 * size, 3, device="cpu")
    long = torch.ones(300_000, device="cpu")
    with torch.device("meta"):
        for tensor in (x, x.half(), x.int(), long, long.bfloat16()):
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Product):
                assert hvd.allreduce(tensor, op=op).is_cpu
            hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3, postscale_factor=0.7)
            hvd.reducescatter(tensor, prescale_factor=0.3)
        hvd.allreduce(long, op=hvd.Adasum)
        output, received = hvd.alltoall(x, splits=[2] * size)
        assert (output.is_cpu, received.tolist()) == (True, [2] * size)
        assert hvd.allgather_object(hvd.broadcast_object("a")) == ["a"] * size
        assert hvd.zeros(3).is_cpu
        leaf = x.clone().requires_grad_()
        for function in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            function(leaf).sum().backward()
        hvd.allreduce(leaf, op=hvd.Max).sum().backward()
        model = torch.nn.Sequential(torch.nn.Linear(4, 3, device="cpu"), hvd.SyncBatchNorm(3, device="cpu"))
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(3):
            optimizer.zero_grad()
            if step != hvd.rank():  # a gradient that is missing on a rank
                batch = torch.arange(20.0, device="cpu").view(5, 4) + hvd.rank()
                model.train(step == 0 and size < 2)(batch).square().sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        if size > 1:
            model.train()(x.new_ones(5, 4) * (1 + hvd.rank())).sum().backward()
    hvd.barrier()  # no rank leaves while another one still sends gradients
