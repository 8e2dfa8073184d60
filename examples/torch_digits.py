"""Train a small CNN on scikit-learn's handwritten digits, on as many processes as the launcher started.

    python examples/torch_digits.py
    horovodrun -np 2 python examples/torch_digits.py --epochs 20 --checkpoint digits.pt

Lines for data-parallel training are marked ``hvd``: a shard of the data for each rank, a learning rate
scaled by the number of ranks and warmed up, the same start on all ranks, averaged gradients and metrics,
progress and checkpoint on rank 0 only.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

BASE_LEARNING_RATE = 0.05
WARMUP_EPOCHS = 3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, help="file that rank 0 writes after each epoch and resumes from (default: none kept)"
    )
    return parser.parse_args()


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1,797 real images of 8 x 8 pixels; they come with scikit-learn, nothing is downloaded."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.25),
        torch.nn.Linear(64, 10),
    )


def learning_rate_schedule(warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: up from one process's to that of all of them, then down in half a cosine."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (1 + (hvd.size() - 1) * step / warmup_steps) / hvd.size()
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))

    return factor


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    """Share of right answers: each rank takes every size-th image, then the counts are summed."""
    model.eval()
    device = next(model.parameters()).device
    images, labels = (column[hvd.rank() :: hvd.size()].to(device) for column in test.tensors)
    right = (model(images).argmax(dim=1) == labels).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(labels), device=device)]), op=hvd.Sum, name="accuracy")
    return (counts[0] / counts[1]).item()


def train(args: argparse.Namespace, checkpoint: Path) -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    train_set, test_set = load_data(args.seed)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    model = make_model().to(device)
    # hvd: size() times the batch bears size() times the learning rate, reached step by step.
    plain = torch.optim.SGD(model.parameters(), lr=BASE_LEARNING_RATE * hvd.size(), momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    schedule = learning_rate_schedule(WARMUP_EPOCHS * len(loader), args.epochs * len(loader))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    # hvd: rank 0 knows where to go on, the others take it from there.
    first_epoch = 0
    if hvd.rank() == 0 and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first_epoch = saved["epoch"]
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=0))
    torch.manual_seed(args.seed + 1 + hvd.rank())  # hvd: dropout differs between ranks

    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # hvd: one bar, and only where somebody can see it move; horovodrun passes the lines on either way.
    hidden = hvd.rank() != 0 or not sys.stdout.isatty()
    with Progress(*columns, transient=True, disable=hidden) as progress:
        bar = progress.add_task("training", total=(args.epochs - first_epoch) * len(loader))
        for epoch in range(first_epoch, args.epochs):
            model.train()
            sampler.set_epoch(epoch)
            total = torch.zeros(())
            for images, labels in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                scheduler.step()
                total += loss.detach().cpu()
                progress.advance(bar)
            mean_loss = hvd.allreduce(total / len(loader), name="loss").item()  # hvd: the average is the default
            if hvd.rank() == 0:
                progress.console.print(f"epoch {epoch + 1}/{args.epochs}  training loss {mean_loss:.4f}")
                save(checkpoint, model, optimizer, scheduler, epoch + 1)
    seconds = time.perf_counter() - started

    result = accuracy(model, test_set)
    if hvd.rank() == 0:
        print(f"test accuracy {result:.2%} after {args.epochs} epochs in {seconds:.1f} s on {hvd.size()} process(es)")


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: object, epoch: int) -> None:
    """Write the checkpoint; a reader sees the old file or the new one, never half of it."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": epoch,
    }
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


def main() -> None:
    args = parse_args()
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        train(args, args.checkpoint or Path(folder) / "digits.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main()
