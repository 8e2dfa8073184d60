"""Each operation in all ways in which a Horovod script calls it; the conformance suite has the shapes and dtypes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import on_ranks

import horovod.torch as hvd

FLOATS = ("HalfTensor", "FloatTensor", "DoubleTensor")
REDUCIBLE = ("IntTensor", "LongTensor", *FLOATS)
DIMS = (1, 2, 3)


def kinds(names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    return itertools.product(names, DIMS)


def random(kind: str, dim: int, low: int = -100, high: int = 100) -> torch.Tensor:
    """The same on every rank."""
    torch.manual_seed(1234)
    return torch.FloatTensor(*([17] * dim)).random_(low, high).type(f"torch.{kind}")


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert (got.dtype, got.shape, got.device) == (wanted.dtype, wanted.shape, wanted.device)
    return bool(torch.allclose(got, wanted, rtol=1e-3 if got.dtype is torch.float16 else 1e-6, atol=0))


def sums() -> None:
    for kind, dim in kinds(REDUCIBLE):
        tensor = random(kind, dim)
        wanted = tensor * hvd.size()
        assert close(hvd.allreduce(tensor, op=hvd.Sum), wanted)
        assert close(hvd.allreduce(tensor, average=False), wanted)
        assert close(hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum)), wanted)
        assert torch.equal(tensor, random(kind, dim))
        mine = tensor.clone()
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        assert close(mine, wanted)
        mine = tensor.clone()
        assert hvd.synchronize(hvd.allreduce_async_(mine, op=hvd.Sum)) is mine
        assert close(mine, wanted)


def averages() -> None:
    for kind, dim in kinds(REDUCIBLE):
        tensor = random(kind, dim)
        for got in (hvd.allreduce(tensor), hvd.allreduce(tensor, average=True), hvd.allreduce(tensor, op=hvd.Average)):
            assert close(got, tensor)
        assert close(hvd.allreduce(tensor, "loss"), tensor)  # a name in the place of average, as Pyro's example has it


def scaling() -> None:
    for kind, dim, factor in itertools.product(REDUCIBLE, DIMS, (0.3, 1.7)):
        tensor, size = random(kind, dim), hvd.size()
        whole = kind in ("IntTensor", "LongTensor")
        # Integers are multiplied as float64 and cut off towards zero; halves as float32.
        wide = torch.float64 if whole or kind == "DoubleTensor" else torch.float32
        before = (tensor.to(wide) * factor).to(tensor.dtype) * size
        after = ((tensor * size).to(wide) * factor).to(tensor.dtype)
        assert close(hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=factor), before)
        assert close(hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=factor), after)
        pair = hvd.grouped_allreduce([tensor, tensor], op=hvd.Sum, prescale_factor=factor)
        assert all(close(got, before) for got in pair)


def groups() -> None:
    for kind in REDUCIBLE:
        tensors = [random(kind, dim) for dim in DIMS]
        wanted = [tensor * hvd.size() for tensor in tensors]
        results = [
            hvd.grouped_allreduce(tensors, op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="group")),
            hvd.grouped_allreduce_([tensor.clone() for tensor in tensors], op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async_([tensor.clone() for tensor in tensors], op=hvd.Sum)),
        ]
        for got in results:
            assert all(close(a, b) for a, b in zip(got, wanted, strict=True))
        assert all(close(a, b) for a, b in zip(hvd.grouped_allreduce(tensors, average=True), tensors, strict=True))


def in_flight() -> None:
    """``poll`` is False while other ranks are not there, and True in the end; alone it is False once."""
    if hvd.rank() > 0:
        hvd.barrier()
    pending = [hvd.allreduce_async(random(kind, dim), name=f"{kind}.{dim}") for kind, dim in kinds(REDUCIBLE)]
    if hvd.rank() == 0:
        assert not hvd.poll(pending[-1])
        hvd.barrier()
    while not all(hvd.poll(handle) for handle in pending):
        pass
    for handle in pending:
        hvd.synchronize(handle)


def gathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [5, 0, 3][:size]
    uneven = torch.full([rows[rank], 17], rank)
    wanted = torch.cat([torch.full([n, 17], r) for r, n in enumerate(rows)])
    assert close(hvd.synchronize(hvd.allgather_async(uneven)), wanted)
    found = hvd.synchronize(hvd.grouped_allgather_async([uneven, uneven]))
    assert isinstance(found, tuple)
    assert all(close(got, wanted) for got in found)


def broadcasts() -> None:
    for root in range(hvd.size()):
        before = torch.full([17], hvd.rank())
        wanted, tensor = torch.full_like(before, root), before.clone()
        assert close(hvd.synchronize(hvd.broadcast_async(tensor, root_rank=root, name="b")), wanted)
        assert torch.equal(tensor, before)
        assert hvd.broadcast_(tensor, root) is tensor
        tensor = before.clone()
        assert hvd.synchronize(hvd.broadcast_async_(tensor, root)) is tensor
        assert close(tensor, wanted)


def alltoalls() -> None:
    rank, size = hvd.rank(), hvd.size()
    # Rank r sends r + 1 rows that hold i to rank i.
    tensor = torch.tensor([i for i in range(size) for _ in range(rank + 1)])
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
    wanted = torch.full([size * (size + 1) // 2], rank)
    got, received = hvd.alltoall(tensor, splits)
    assert close(got, wanted)
    assert received.dtype is torch.int32
    assert received.tolist() == list(range(1, size + 1))
    even = torch.arange(2 * size)
    output, received = hvd.synchronize(hvd.alltoall_async(even, name="e"))
    assert close(output, hvd.alltoall(even))
    assert received.tolist() == [2] * size
    nothing, received = hvd.alltoall(torch.empty(0, 4), torch.zeros(size, dtype=torch.int32))
    assert (nothing.shape, received.tolist()) == ((0, 4), [0] * size)


def reducescatters() -> None:
    size = hvd.size()
    tensor = torch.arange(7.0)
    own = hvd.reducescatter(tensor)
    assert close(hvd.synchronize(hvd.reducescatter_async(tensor, op=hvd.Sum, name="rs")), own * size)
    got = hvd.grouped_reducescatter([tensor, tensor], op=hvd.Sum, postscale_factor=2.0)
    assert all(close(one, own * size * 2) for one in got)
    handle = hvd.grouped_reducescatter_async([tensor, tensor], prescale_factor=2.0)
    assert all(close(one, own * 2) for one in hvd.synchronize(handle))


def compressed() -> None:
    for kind, dim in kinds(FLOATS):
        tensor = random(kind, dim)
        assert close(hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16), tensor * hvd.size())
        assert close(hvd.reducescatter(tensor, compression=hvd.Compression.fp16), hvd.reducescatter(tensor))
        (got,) = hvd.grouped_allreduce([tensor], compression=hvd.Compression.fp16)
        assert close(got, tensor)


def layouts() -> None:
    """Arguments that Horovod refuses: tensors that are not contiguous, other dtypes, autograd's leaves in place."""
    size = hvd.size()
    base = torch.arange(12.0).view(3, 4)
    for tensor in (base.t(), base[:, 1:3], base[::2], base[:1].expand(3, 4)):
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), tensor * size)
        assert torch.equal(hvd.broadcast(tensor, 0), tensor)
        assert torch.equal(hvd.allgather(tensor), torch.cat([tensor] * size))
    column = base.clone()[:, 1]
    hvd.allreduce_(column, op=hvd.Sum)
    assert torch.equal(column, base[:, 1] * size)
    for dtype in (torch.bfloat16, torch.complex64, torch.uint16, torch.uint8):
        tensor = torch.tensor([1, 2, 3]).to(dtype)
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum).to(torch.complex64), tensor.to(torch.complex64) * size)
    assert hvd.allreduce(torch.tensor([True, False]), op=hvd.Sum).tolist() == [True, False]
    leaf = torch.nn.Parameter(torch.ones(3))
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert leaf.tolist() == [size] * 3
    assert hvd.allreduce(torch.tensor(3.0), op=hvd.Sum).item() == 3.0 * size


CHECKS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        sums, averages, scaling, groups, in_flight, gathers, broadcasts, alltoalls, reducescatters,
        compressed, layouts,
    )
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("check", sorted(CHECKS))
@on_ranks()
def test_operation(check: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Parameter `average`", DeprecationWarning)
        CHECKS[check]()
