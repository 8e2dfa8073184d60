"""SyncBatchNorm equals BatchNorm over the concatenated batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import Ranks, on_ranks, run_ranks
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd

CHANNELS = 4
SHAPES = {"1d": (), "1d with length": (5,), "2d": (3, 2), "3d": (2, 2, 2)}


def plain_layer(dims: int, **options: Any) -> torch.nn.Module:
    cls = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}[dims]
    layer = cls(CHANNELS, dtype=torch.float64, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.uniform_(-1, 1)
            layer.bias.uniform_(-1, 1)
    return layer


def difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert (a is None) == (b is None)
    if a is None or b is None or not a.numel():
        return 0.0
    return float((a.detach() - b.detach()).abs().max())


def compare(
    kind: str, sizes: list[int], offset: float, options: dict[str, Any], without: tuple[str, ...] = ()
) -> float:
    rank, tail = hvd.rank(), SHAPES[kind]
    torch.manual_seed(0)
    reference = plain_layer(len(tail), **options)
    for name in without:
        setattr(reference, name, None)
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    assert type(layer) is hvd.SyncBatchNorm
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    errors = []
    for _ in range(3):
        x = torch.randn(sum(sizes), CHANNELS, *tail, dtype=torch.float64) * 3 + offset
        slope = torch.randn_like(x)
        whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        wanted, got = reference(whole), layer(part)
        wanted.backward(slope)
        got.backward(slope[mine])
        errors += [difference(got, wanted[mine]), difference(part.grad, whole.grad[mine])]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            errors.append(difference(getattr(layer, name), getattr(reference, name)))
    if layer.affine:
        for name in sorted({"weight", "bias"}.difference(without)):
            summed = hvd.allreduce(getattr(layer, name).grad, op=hvd.Sum)
            errors.append(difference(summed, getattr(reference, name).grad))
    layer.eval()
    reference.eval()
    errors.append(difference(layer(x), reference(x)))
    return max(errors)


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_equals_the_concatenated_batch(kind: str) -> None:
    assert max(run_ranks(2, compare, kind, [3, 5], 0.0, {})) < 1e-10


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 0, 6], [1, 1, 0]], ids=str)
def test_batches_may_differ_and_be_empty(sizes: list[int]) -> None:
    assert max(run_ranks(3, compare, "2d", sizes, 0.0, {})) < 1e-10


def test_large_means_do_not_cancel() -> None:
    assert max(run_ranks(2, compare, "2d", [3, 5], 1000.0, {})) < 1e-8


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1}], ids=str
)
def test_options_of_batch_norm(options: dict[str, Any]) -> None:
    if options.get("track_running_stats") is False:
        # Then evaluation normalizes with this rank's batch alone, as BatchNorm does; compared on the same input.
        options = {**options, "affine": True}
    assert max(run_ranks(2, compare, "2d", [3, 5], 0.0, options)) < 1e-10


@pytest.mark.parametrize("without", ["weight", "bias"])
def test_weight_or_bias_may_be_missing(without: str) -> None:
    assert max(run_ranks(2, compare, "2d", [3, 5], 0.0, {}, (without,))) < 1e-10


def trains(passes: int, checkpointed: bool, ranks: list[int]) -> torch.Tensor:
    """Train on the rows of these ranks, or as one rank of several."""
    torch.manual_seed(1)
    net: Any = torch.nn.Sequential(
        torch.nn.Linear(3, CHANNELS), torch.nn.BatchNorm1d(CHANNELS), torch.nn.Linear(CHANNELS, 1)
    ).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if not ranks:
        net = hvd.SyncBatchNorm.convert_sync_batchnorm(net)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), backward_passes_per_step=passes
        )
    for step in range(4):
        optimizer.zero_grad()
        for part in range(passes):
            mine = torch.cat([inputs(step + 4 * part, rank) for rank in ranks or [hvd.rank()]])
            output = checkpoint(net, mine, use_reentrant=False) if checkpointed else net(mine)
            output.square().mean().backward()
        optimizer.step()
    return torch.cat([value.flatten().double() for value in net.state_dict().values()])


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(("passes", "checkpointed"), [(1, False), (2, False), (1, True)])
def test_trains_as_one_process(passes: int, checkpointed: bool) -> None:
    alone = trains(passes, checkpointed, [0, 1])
    for together in run_ranks(2, trains, passes, checkpointed, []):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_half_precision_inputs_are_summed_as_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, CHANNELS, 3, 3)
    reference, layer = torch.nn.BatchNorm2d(CHANNELS), hvd.SyncBatchNorm(CHANNELS)
    wanted = reference(x)
    got = layer(x[hvd.rank() * 4 :][:4].to(dtype))
    assert got.dtype is dtype
    assert difference(got.float(), wanted[hvd.rank() * 4 :][:4]) < 0.03


def one_value() -> None:
    hvd.SyncBatchNorm(CHANNELS)(torch.zeros(1 - hvd.rank(), CHANNELS))


def test_one_value_per_channel_is_refused_on_every_rank() -> None:
    for outcome in Ranks(2, one_value).outcomes():
        assert "more than 1 value per channel" in str(outcome.error)


def test_shapes_are_checked() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="2 or more dimensions"):
        layer(torch.zeros(CHANNELS))
    with pytest.raises(ValueError, match=f"{CHANNELS} channels in dimension 1. Received: 3"):
        layer(torch.zeros(2, 3))


def test_without_other_ranks_it_is_batch_norm() -> None:
    x = torch.randn(6, CHANNELS)
    torch.testing.assert_close(hvd.SyncBatchNorm(CHANNELS)(x), torch.nn.BatchNorm1d(CHANNELS)(x))


def test_converting_keeps_parameters_and_mode() -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.BatchNorm1d(3), "b": torch.nn.Sequential(torch.nn.BatchNorm2d(2))}).eval()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net
    assert [type(net["a"]), type(net["b"][0])] == [hvd.SyncBatchNorm] * 2  # type: ignore[index]
    assert not net["a"].training
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(net["a"]) is net["a"]


def test_a_layer_with_two_names_is_one_layer_after_conversion() -> None:
    shared = torch.nn.BatchNorm1d(3)
    net = torch.nn.ModuleDict({"a": shared, "again": shared, "b": torch.nn.Sequential(shared)})
    hvd.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(net["a"], hvd.SyncBatchNorm)
    assert net["a"] is net["again"] is net["b"][0]  # type: ignore[index]
