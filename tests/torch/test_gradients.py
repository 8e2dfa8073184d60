"""Autograd goes through the collectives; gradients against hand-made ones and against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import horovod.torch as hvd
from horovod.errors import MismatchError

Function = Callable[[torch.Tensor], torch.Tensor]
F64 = torch.float64


def tensor(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank + 1), dtype=F64)


def weights(like: torch.Tensor) -> torch.Tensor:
    """This rank's weights of the outputs in the loss; they differ between ranks."""
    return torch.arange(1, like.numel() + 1, dtype=F64).view(like.shape) * (hvd.rank() + 1)


def finite_difference(function: Function, x: torch.Tensor, everybody: str) -> torch.Tensor:
    """Derivative of the sum (or average) of all ranks' losses by this rank's input, one element at a time."""
    result, step = torch.zeros_like(x), 1e-6
    flat = result.view(-1)
    for rank in range(hvd.size()):
        # All ranks call the collective as often; only one moves its input at a time.
        count = hvd.broadcast_object(x.numel(), rank)
        for i in range(count):
            losses = []
            for sign in (1, -1):
                moved = x.clone()
                if rank == hvd.rank():
                    moved.view(-1)[i] += sign * step
                y = function(moved)
                losses.append(sum(hvd.allgather_object(float((y * weights(y)).sum()))))
            if rank == hvd.rank():
                flat[i] = (losses[0] - losses[1]) / (2 * step)
    return result / hvd.size() if everybody == "average" else result


CASES: dict[str, tuple[Function, tuple[int, ...], str, float]] = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), (3, 2), "sum", 1),
    "average": (lambda x: hvd.allreduce(x), (3, 2), "sum", 1),
    "scaled": (
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, name="s"), (4,), "sum", 1,
    ),
    "min": (lambda x: hvd.allreduce(x, op=hvd.Min), (5,), "sum", 1),
    "max": (lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=0.3, postscale_factor=2.0), (5,), "sum", 1),
    "product": (lambda x: hvd.allreduce(x, op=hvd.Product, prescale_factor=2.0), (5,), "sum", 1),
    "grouped": (lambda x: sum(hvd.grouped_allreduce([x, 2 * x[:1]], op=hvd.Sum)), (1, 2), "sum", 1),
    "allgather": (lambda x: hvd.allgather(x), (2, 3), "average", 1),
    "grouped allgather": (lambda x: torch.cat(hvd.grouped_allgather([x, 3 * x])), (2, 3), "average", 1),
    "broadcast": (lambda x: hvd.broadcast(x, 1), (2, 2), "average", 1),
    "alltoall": (lambda x: hvd.alltoall(x), (6, 2), "sum", 1),
    # Horovod's convention, see horovod.torch.gradients.
    "reducescatter sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum), (5, 2), "sum", 2),
    "reducescatter average": (lambda x: hvd.reducescatter(x), (5, 2), "sum", 2),
    "grouped reducescatter": (lambda x: torch.cat(hvd.grouped_reducescatter([x, x * x])), (4, 2), "sum", 2),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CASES))
@on_ranks(2)
def test_gradient_equals_finite_differences(case: str) -> None:
    function, shape, everybody, factor = CASES[case]
    x = tensor(hvd.rank(), *shape)
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    (grad,) = torch.autograd.grad((y * weights(y)).sum(), leaf)
    assert torch.equal(function(x), y.detach())
    wanted = finite_difference(function, x, everybody) * factor
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-6)


# The average weight over ranks is 2 times the number of the element.
@on_ranks(
    3,
    returns=[
        ([], [1.0, 3.0], [1, 2, 3]),
        ([[2.0, 4.0]], [1.0, 1.0, 3.0], [0, 0, 0]),
        ([[6.0, 8.0], [10.0, 12.0]], [1.0, 1.0, 1.0, 3.0], [1, 1, 1]),
    ],
)
def test_gradients_of_uneven_rows() -> tuple[list[list[float]], list[float], list[int]]:
    rank = hvd.rank()
    rows = torch.ones(rank, 2, dtype=F64, requires_grad=True)
    gathered = hvd.allgather(rows)
    (grad,) = torch.autograd.grad((gathered * weights(gathered)).sum(), rows)
    # Rank r sends r + 1 rows to rank 0, none to rank 1, one to rank 2.
    sent = torch.ones(rank + 2, 1, dtype=F64, requires_grad=True)
    output, received = hvd.alltoall(sent, splits=[rank + 1, 0, 1])
    (back,) = torch.autograd.grad((output * (rank + 1)).sum(), sent)
    return grad.tolist(), back.flatten().tolist(), received.tolist()


@on_ranks(3)
def test_gradients_of_gathered_rows_while_a_rank_has_joined() -> None:
    rank = hvd.rank()
    if rank > 0:
        rows = torch.ones(rank, 2, dtype=F64, requires_grad=True)
        once, again = hvd.grouped_allgather([rows, rows])
        for gathered in (hvd.allgather(rows), once, again):
            (grad,) = torch.autograd.grad((gathered * weights(gathered)).sum(), rows, retain_graph=True)
            # Ranks 1 and 2 weigh by 2 and 3, and an average is over all three ranks.
            torch.testing.assert_close(grad, torch.tensor([[[1, 2]], [[3, 4], [5, 6]]][rank - 1], dtype=F64) * 5 / 3)
    hvd.join()


@on_ranks(3)
def test_rows_of_a_rank_that_joined_without_the_gradient_are_told() -> None:
    x = torch.ones(1, requires_grad=True)
    loss = hvd.allgather(x, name="x").sum()
    if hvd.rank() > 0:
        with pytest.raises(hvd.HorovodInternalError, match="allgather x has rows of a rank that has called join since"):
            loss.backward()
    hvd.join()


@on_ranks(2, returns=[([1.0, 0.0, 1.0], [2.0, 2.0, 0.0]), ([1.0, 2.0, 1.0], [2.0, 0.0, 0.0])])
def test_ties_share_and_zeros_in_products_are_right() -> tuple[list[float], list[float]]:
    x = torch.tensor([1.0, float(hvd.rank()), 0.0], requires_grad=True)
    (most,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Max).sum(), x)
    (product,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Product).sum(), x)
    return most.tolist(), product.tolist()


# Both losses are the imaginary part of 2j * 3, and torch's gradient of it is 1j.
@on_ranks(2, returns=[6j, 4 + 0j])
def test_gradients_of_complex_products_are_conjugate() -> complex:
    x = torch.tensor(3.0 if hvd.rank() else 2j, dtype=torch.complex128, requires_grad=True)
    (grad,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Product).imag, x)
    return complex(grad)


@on_ranks(2)
def test_compression_casts_and_is_differentiable() -> None:
    x = torch.full((3,), 0.1, requires_grad=True)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        one = hvd.allreduce(x, compression=compression)
        two = hvd.grouped_allreduce([x, x], compression=compression)
        three = hvd.reducescatter(x, compression=compression)
        (grad,) = torch.autograd.grad(one.sum() + two[1].sum() + three.sum(), x)
        assert one.dtype is two[0].dtype is three.dtype is grad.dtype is torch.float32
        assert float(one[0]) == pytest.approx(0.1, abs=1e-3)
        assert grad.tolist() == [3.0] * 3


@on_ranks(2, returns=[[False, True, False]] * 2)
def test_no_graph_is_built_where_nobody_wants_one() -> list[bool]:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        quiet = hvd.allreduce(x)
    return [quiet.requires_grad, hvd.allreduce(x).requires_grad, hvd.allreduce(x.detach()).requires_grad]


@pytest.mark.parametrize(("op", "factor"), [(hvd.Sum, 1.0), (hvd.Average, 0.5)])
@on_ranks(2)
def test_sparse_allreduce(op: int, factor: float) -> None:
    rank = hvd.rank()
    mine = torch.sparse_coo_tensor([[0, rank + 1, 0]], torch.tensor([[1.0, 2.0]] * 3), (4, 2), check_invariants=True)
    wanted = torch.tensor([[4.0, 8.0], [1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]) * factor
    assert torch.equal(hvd.sparse_allreduce_async(mine, "table", op)().to_dense(), wanted)


@pytest.mark.parametrize("ranks", [3, 6])
@on_ranks()
def test_equal_sparse_tensors_average_to_themselves() -> None:
    numbers = torch.arange(-500, 500) * 0.37
    tensors = [numbers.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64)]
    tensors += [torch.full((3,), 2_000_000_000, dtype=torch.int32), torch.full((3,), -128, dtype=torch.int8)]
    found = [hvd.sparse_allreduce_async(tensor.to_sparse(), None, hvd.Average)().to_dense() for tensor in tensors]
    assert not [str(got.dtype) for got, want in zip(found, tensors, strict=True) if not torch.equal(got, want)]


@on_ranks(2)
def test_sparse_tensors_of_different_sizes_are_an_error_on_every_rank() -> None:
    last = 10 + 90 * hvd.rank()
    mine = torch.sparse_coo_tensor([[last - 1]], torch.ones(1), (last,), check_invariants=True)
    with pytest.raises(MismatchError, match=r"table.*\(10,\), \(100,\)"):
        hvd.sparse_allreduce_async(mine, "table", hvd.Sum)()


def test_sparse_allreduce_refuses_dense_tensors_and_other_ops() -> None:
    with pytest.raises(ValueError, match=r"torch\.strided"):
        hvd.sparse_allreduce_async(torch.zeros(2), "x", hvd.Sum)
    with pytest.raises(ValueError, match="MAX"):
        hvd.sparse_allreduce_async(torch.zeros(2).to_sparse(), "x", hvd.Max)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_a_second_derivative_is_refused() -> None:
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter,
        lambda x: hvd.grouped_allreduce([x])[0], hvd.SyncBatchNorm(1).double(),
    ]  # fmt: skip
    for call in calls:
        x = torch.arange(float(2 * hvd.size()), dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(call((x * x)[:, None]).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("ranks", [2])
@on_ranks()
def test_a_second_derivative_of_a_linear_loss_is_refused_if_it_is_not_zero() -> None:
    for call in (hvd.SyncBatchNorm(1).double(), lambda x: hvd.allreduce(x, op=hvd.Product)):
        x = torch.arange(1.0, 5.0, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad((call(x[:, None]) * x.detach()[:, None]).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(grad.sum(), x)


@on_ranks(2)
def test_transformed_tensors_are_refused_and_ranks_go_on() -> None:
    x = torch.ones(3, 2)
    forward_ad = torch.autograd.forward_ad
    with pytest.raises(ValueError, match=r"torch\.vmap"):
        torch.vmap(hvd.allreduce)(x)
    with pytest.raises(ValueError, match=r"torch\.vmap"):
        torch.vmap(lambda row: hvd.allreduce_(row.clone()))(x)
    with pytest.raises(ValueError, match="forward-mode"):
        torch.func.jvp(hvd.allreduce, (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match="forward-mode"):
            hvd.allreduce(forward_ad.make_dual(x, x))
        assert hvd.allreduce(x, op=hvd.Sum).sum() == 12
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="a FakeTensor cannot be sent"):
        hvd.broadcast(mode.from_tensor(x), 0)
    assert hvd.allreduce(x, op=hvd.Sum).sum() == 12
