"""Tensors whose memory does not hold their values: torch conjugates and negates when somebody reads them."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd
from horovod.torch.adapter import TorchAdapter


@on_ranks(2)
def test_a_view_that_is_conjugated_or_negated_when_it_is_read_is_sent_as_its_reader_sees_it() -> None:
    rank, size = hvd.rank(), hvd.size()
    for count in (4, 64 << 10):  # what is sent along, and what is not
        rows = slice(rank * count // size, (rank + 1) * count // size)
        for shared in (True, False):
            make = hvd.zeros if shared else torch.zeros
            for one in range(2):  # of all ranks, of one of them
                is_lazy = rank == 0 or not one
                # Rank r's tensor is, to its reader, n - (r + 1)j.
                tensor = make(count, dtype=torch.complex64)
                tensor.copy_(torch.complex(torch.arange(count).float(), torch.full((count,), rank + 1.0)))
                tensor = tensor.conj() if is_lazy else tensor.conj_physical_()
                assert tensor.is_conj() == is_lazy
                mine = tensor.clone()
                total = torch.complex(torch.arange(count) * 2.0, torch.full((count,), -3.0))
                assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), total[rows])
                assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), total)
                assert torch.equal(hvd.allgather(tensor).imag[::count], torch.tensor([-1.0, -2.0]))
                assert torch.equal(tensor, mine)
                assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
                assert torch.equal(tensor, total)
            real = make(count, dtype=torch.float32).fill_(rank + 1.0)
            negative = torch._neg_view(real)
            assert torch.equal(hvd.reducescatter(negative, op=hvd.Sum), torch.full((count // size,), -3.0))
            hvd.grouped_allreduce_([negative, torch.ones(1)], op=hvd.Sum)
            assert bool((negative == -3.0).all())
            assert bool((real == 3.0).all())


@pytest.mark.parametrize("view", [torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))])
def test_such_a_view_has_no_buffer_but_a_copy(view: torch.Tensor) -> None:
    adapter = TorchAdapter()
    assert adapter.buffer(view) is None
    assert adapter.target(view) is None
    copy = adapter.contiguous(view)
    assert torch.equal(copy, view)
    assert adapter.buffer(copy) is copy
