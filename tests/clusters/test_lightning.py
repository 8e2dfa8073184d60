"""Lightning and Fabric: ranks train as one process does on the same samples, and have the same bits."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks

pytest.importorskip("lightning", reason="needs: pip install khorovod[lightning]")

ROWS, BATCH = 48, 4


def _data() -> tuple[Any, Any]:
    import torch

    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
    return inputs, inputs @ torch.randn(6, 1, generator=draw, dtype=torch.float64)


def _net(seed: int, norm: bool) -> Any:
    import torch

    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*(layers[:1] + [torch.nn.BatchNorm1d(8)] * norm + layers[1:])).double()


def _weights(model: Any) -> list[Any]:
    return [value.detach().numpy().copy() for value in model.state_dict().values()]


def _rows(epoch: int, shuffles: bool) -> Any:
    """Which samples two ranks have, by rank and batch: as Lightning deals them."""
    import torch

    dealt = []
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(range(ROWS), 2, rank, shuffle=shuffles)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        dealt.append(list(sampler))
    return torch.tensor(dealt).reshape(2, -1, BATCH)


def _alone(passes: int, norm: bool, shuffles: bool = True) -> list[Any]:
    """One process on the samples that both ranks have together; the last step of an epoch may have fewer passes."""
    import torch

    inputs, targets = _data()
    model = _net(0, norm)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for epoch in range(2):
        order = _rows(epoch, shuffles)
        batches = order.shape[1]
        for batch in range(batches):
            rows = order[:, batch].flatten()
            (torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]) / passes).backward()
            if (batch + 1) % passes == 0 or batch + 1 == batches:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return _weights(model)


def _module(norm: bool, package: str = "lightning") -> Any:
    import torch

    import horovod.torch as hvd

    class Module(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(hvd.rank(), norm)
            self.seen: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(self.net(inputs), targets)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("rank", float(hvd.rank()), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.05)

    return Module()


def _fit(folder: str, passes: int, norm: bool, package: str) -> tuple[list[Any], int, float]:
    import torch

    module, lightning = _module(norm, package), importlib.import_module(package)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_data()), BATCH)
    trainer = lightning.Trainer(
        strategy=importlib.import_module(f"horovod.{package}").HorovodStrategy(),
        accelerator="cpu", max_epochs=2, gradient_clip_val=0.3, sync_batchnorm=norm,
        accumulate_grad_batches=passes, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert len(checkpoint["optimizer_states"]) == 1
    return _weights(module.net), trainer.world_size, float(trainer.callback_metrics["rank"])


@pytest.mark.parametrize(
    ("passes", "norm", "package"),
    [(1, False, "lightning"), (1, True, "lightning"), (4, False, "lightning"), (4, True, "pytorch_lightning")],
)
def test_ranks_fit_as_one_process_does(tmp_path: Path, passes: int, norm: bool, package: str) -> None:
    # Six batches for each of two ranks: with four passes, the last step of an epoch has two.
    (first, size, mean), (second, *_) = run_ranks(2, _fit, str(tmp_path), passes, norm, package)
    assert (size, mean) == (2, 0.5)
    for mine, other, wanted in zip(first, second, _alone(passes, norm), strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-9)


def _one_epoch(module: Any, loader: Any, folder: str, **settings: Any) -> None:
    """Train for an epoch, without a checkpoint."""
    import lightning

    from horovod.lightning import HorovodStrategy

    lightning.Trainer(
        strategy=HorovodStrategy(), accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, **settings,
    ).fit(module, loader)  # fmt: skip


def _adversarial(folder: str) -> tuple[list[Any], list[Any]]:
    """Two optimizers by hand, whose losses both reach both networks."""
    import lightning
    import torch

    import horovod.torch as hvd

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = _net(hvd.rank(), False), _net(7 + hvd.rank(), False)

        def training_step(self, batch: Any, index: int) -> None:
            inputs, targets = batch
            for turn, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                loss = (self.first(inputs) * (1 - 2 * turn) + self.second(inputs) - targets).square().mean()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), 0.05) for net in (self.first, self.second)]

    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_data()), BATCH)
    _one_epoch(module, loader, folder)
    return _weights(module), _alone_adversarial()


def _alone_adversarial() -> list[Any]:
    import torch

    inputs, targets = _data()
    nets = [_net(0, False), _net(7, False)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in nets]
    order = _rows(0, True)
    for batch in range(order.shape[1]):
        rows = order[:, batch].flatten()
        for turn, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            found = nets[0](inputs[rows]) * (1 - 2 * turn) + nets[1](inputs[rows])
            (found - targets[rows]).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(nets[turn].parameters(), 0.3)
            optimizer.step()
    return [value for net in nets for value in _weights(net)]


def test_several_optimizers_by_hand(tmp_path: Path) -> None:
    for mine, wanted in run_ranks(2, _adversarial, str(tmp_path)):
        for value, other in zip(mine, wanted, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-6, atol=1e-9)


def _contrastive(folder: str) -> list[Any]:
    """A loss over the outputs of all ranks, with gradients that a hook changes."""
    import lightning
    import torch

    import horovod.torch as hvd

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(hvd.rank(), False)

        def training_step(self, batch: Any, index: int) -> Any:
            found = self.all_gather(self.net(batch[0]), sync_grads=True)
            return (found - found.mean()).square().mean()

        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad.clamp_(-0.01, 0.01)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.5)

    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_data()), BATCH)
    _one_epoch(module, loader, folder)
    return _weights(module.net)


def test_hooks_and_losses_over_all_ranks_are_as_in_one_process(tmp_path: Path) -> None:
    import torch

    inputs, _ = _data()
    model = _net(0, False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for rows in _rows(0, True).transpose(0, 1):
        found = model(inputs[rows.flatten()])
        optimizer.zero_grad()
        (found - found.mean()).square().mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    for weights in run_ranks(2, _contrastive, str(tmp_path)):
        for mine, wanted in zip(weights, _weights(model), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("passes", [1, 4])
@on_ranks(2)
def test_fabric_trains_as_one_process_does(passes: int) -> None:
    import torch
    from lightning.fabric import Fabric

    import horovod.torch as hvd
    from horovod.lightning import HorovodFabricStrategy

    fabric = Fabric(accelerator="cpu", strategy=HorovodFabricStrategy())
    fabric.launch()
    plain = _net(hvd.rank(), False)
    first = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.05))  # of an earlier phase of the script
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters(), 0.05))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_data()), BATCH))
    for _ in range(2):
        for batch, (inputs, targets) in enumerate(loader):
            is_last = (batch + 1) % passes == 0 or batch + 1 == len(loader)
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets) / passes)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
    gathered = fabric.all_gather(torch.tensor([fabric.global_rank]))
    del first
    found, seen = _weights(plain), (gathered.tolist(), float(fabric.all_reduce(torch.tensor(fabric.global_rank))))
    assert seen == ([[0], [1]], 0.5)
    for mine, wanted in zip(found, _alone(passes, False, shuffles=False), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-9)


def _uneven_and_lbfgs(folder: str) -> list[Any]:
    """Weights after rank 0 had more batches; then, of LBFGS, which repeats its closure."""
    import torch

    import horovod.torch as hvd

    found = []
    for is_even in (False, True):
        module = _module(False)
        if is_even:
            module.configure_optimizers = lambda module=module: torch.optim.LBFGS(module.parameters(), 0.1, 3)
        rows = torch.utils.data.Subset(torch.utils.data.TensorDataset(*_data()), range(48 if hvd.rank() == 0 else 24))
        loader = torch.utils.data.DataLoader(rows, BATCH)
        _one_epoch(module, loader, folder, use_distributed_sampler=False, limit_train_batches=6 if is_even else None)
        found.append(_weights(module.net))
    return found


def test_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    first, second = run_ranks(2, _uneven_and_lbfgs, str(tmp_path))
    for mine, other in zip(first[0] + first[1], second[0] + second[1], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not np.array_equal(first[1][0], _net(0, False).state_dict()["0.weight"])


def _statistics(folder: str) -> tuple[list[Any], list[Any]]:
    """Return the model after the last batch and after ``fit``, where rank 1 is the last that comes to its end."""
    import horovod.torch as hvd

    join = hvd.join
    hvd.join = lambda: max(join(), 1)
    module = _module(True)
    kept: list[Any] = []
    module.on_train_epoch_end = lambda: kept.extend(_weights(module.net))
    import torch

    _one_epoch(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_data()), BATCH), folder)
    hvd.join = join
    return kept, _weights(module.net)


def test_ranks_end_with_the_statistics_of_rank_0_as_in_checkpoints(tmp_path: Path) -> None:
    (wanted, first), (other, second) = run_ranks(2, _statistics, str(tmp_path))
    assert any(not np.array_equal(mine, theirs) for mine, theirs in zip(wanted, other, strict=True))
    for values in zip(wanted, first, second, strict=True):
        np.testing.assert_array_equal(values[1:], values[:1] * 2)


@on_ranks(1, returns=[("HorovodStrategy", "HorovodFabricStrategy")])
def test_the_strategy_has_a_name() -> tuple[str, str]:
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"  # as if mpi4py were installed without an MPI library
    import lightning
    from lightning.fabric import Fabric

    import horovod.lightning  # noqa: F401 - registers the name
    from horovod.rendezvous import mpi

    mpi.limit_end()  # as at the end of a failed rank
    for wrong in ({"devices": 3}, {"num_nodes": 2}):
        for made in (lightning.Trainer, Fabric):
            with pytest.raises(ValueError, match=r"the launcher started 1\. Leave both out"):
                made(strategy="horovod", accelerator="cpu", **wrong)  # type: ignore[arg-type]
    trainer = lightning.Trainer(strategy="horovod", accelerator="cpu", logger=False, enable_progress_bar=False)
    return type(trainer.strategy).__name__, type(Fabric(strategy="horovod", accelerator="cpu").strategy).__name__
