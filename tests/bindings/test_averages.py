"""Averages of equal tensors are these tensors, and factors multiply as in the tensor's dtype.

``tests/transports/test_averages.py`` takes 2 to 6 ranks over every route.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from harness import on_ranks

import horovod.numpy
import horovod.torch as hvd

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
FACTORS = (1 / 3, 0.1, 3.0)


def _tensors(count: int) -> list[torch.Tensor]:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = [torch.full((count,), 2_000_000_000, dtype=torch.int32), torch.full((count,), -100, dtype=torch.int8)]
    return [drawn.to(dtype) for dtype in DTYPES] + whole


@on_ranks(3)
def test_factors_multiply_in_the_dtype_of_the_tensor() -> None:
    """One rank has the tensor and the others zeros, so that nothing but the factor rounds."""
    rank, size = hvd.rank(), hvd.size()
    for tensor in (tensor for rows in (7, 4000) for tensor in _tensors(size * rows)[: len(DTYPES)]):
        mine = slice(rank * len(tensor) // size, (rank + 1) * len(tensor) // size)
        own = tensor if rank == 0 else torch.zeros_like(tensor)
        for factor in FACTORS:
            want = tensor * factor
            for how in ({"prescale_factor": factor}, {"postscale_factor": factor}):
                keywords: Any = {"op": hvd.Sum, **how}
                results = [hvd.allreduce(own, **keywords), hvd.grouped_allreduce([own, own], **keywords)[1]]
                results.append(hvd.allreduce(tensor, **how))  # the average of equal tensors
                most: Any = {"op": hvd.Max, **how}
                if not tensor.is_complex():
                    results.append(hvd.allreduce(tensor, **most))
                assert all(torch.equal(result, want) for result in results), (tensor.dtype, how)
                assert torch.equal(hvd.reducescatter(own, **keywords), want[mine]), (tensor.dtype, how)
                if tensor.dtype is not torch.bfloat16:
                    np.testing.assert_array_equal(horovod.numpy.allreduce(own.numpy(), **keywords), want.numpy())
                    if not tensor.is_complex():
                        np.testing.assert_array_equal(horovod.numpy.allreduce(tensor.numpy(), **most), want.numpy())


@on_ranks(3)
def test_equal_gradients_average_to_themselves() -> None:
    """Every rank has the same gradients, so that the reduced ones are the local ones; a factor of 2 is exact."""
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, lambda grad: grad),
        ({"backward_passes_per_step": 2}, lambda grad: grad + grad),
        ({"gradient_predivide_factor": 2.0}, lambda grad: grad),
        ({"compression": hvd.Compression.fp16}, lambda grad: grad.half().float()),
        ({"compression": hvd.Compression.bf16}, lambda grad: grad.bfloat16().float()),
        ({"sparse_as_dense": True}, lambda grad: grad),
        ({"groups": 2}, lambda grad: grad),
    ]
    for options, expected in cases:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Embedding(40, 9, sparse=True), torch.nn.Linear(9, 31)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        weights = [torch.randn_like(parameter) for parameter in model.parameters()]
        places, passes = torch.arange(40), options.get("backward_passes_per_step", 1)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(passes):
                loss = (model[0](places) * weights[0]).sum()
                for parameter, weight in zip(model[1].parameters(), weights[1:], strict=True):
                    loss = loss + (parameter * weight).sum()
                loss.backward()
            optimizer.synchronize()
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                grad = parameter.grad.to_dense()
                # A compressor leaves sparse gradients alone.
                want = expected(weight) if not parameter.grad.is_sparse or passes > 1 else weight
                assert torch.equal(grad, want), (options, grad, want)
