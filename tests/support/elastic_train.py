"""A small training for tests of elastic jobs: its processes end themselves where a test says."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import numpy as np
import torch

import horovod.torch as hvd
from horovod import context
from horovod.bindings import process_sets

__all__ = [
    "FEATURES",
    "gathered_shards",
    "horovod_script",
    "kept_things",
    "linear_from",
    "parts",
    "snapshot",
    "train_on",
    "train_steps",
]

FEATURES = 6


def parts(seed: int = 1) -> tuple[torch.nn.Module, Any]:
    """A model with batch norm and dropout, and its optimizer."""
    torch.manual_seed(seed)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(FEATURES, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def train_on(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """One step of training, on data that depend on step, rank and size."""
    data = torch.from_numpy(np.random.RandomState(100 * step + 10 * hvd.size() + hvd.rank()).randn(5, FEATURES)).float()
    optimizer.zero_grad()
    model(data).square().sum().backward()
    optimizer.step()


def snapshot(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything that the next step depends on."""
    return copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}
    )


def end_here() -> None:
    """End this process as a machine that loses power does."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_steps(deaths: dict[int, tuple[str, int, int]], steps: int, full: int = 0) -> dict[str, Any]:
    """Train with ``hvd.elastic.step``; processes end themselves at given places.

    Args:
        deaths: by number of the slot: the place, the step, and the generation in which its process ends.
        steps: when to stop.
        full: number of ranks that must be there for five steps after a change before that.

    Returns:
        By step, the number of ranks and the state after it; and more that this process has seen.
    """
    place, step, generation = deaths.get(int(os.environ["HOROVOD_SLOT"]), ("", -1, -1))
    hvd.init()
    model, optimizer = parts(seed=10 + int(os.environ["HOROVOD_SLOT"]))
    seen: dict[str, Any] = {"history": {}, "sizes": {}, "entries": 0}

    def die(here: str) -> None:
        if here == place and state.batch == step and context.membership().number == generation:
            end_here()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, waits=5 if full else 0)
    model[0].register_forward_hook(lambda *_: die("forward"))
    # Before the gradient is there: the others must not get all that they need of this step.
    model[0].weight.register_hook(lambda _: die("backward"))
    state.register_reset_callbacks([lambda: die("callback")])

    @hvd.elastic.step
    def one(state: Any) -> None:
        train_on(state.model, state.optimizer, state.batch)
        die("end of step")
        state.batch += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        seen["entries"] += 1
        while state.batch < steps or state.waits > 0:
            die("between")
            one(state)
            state.waits -= hvd.size() == full and context.membership().number > 1
            seen["sizes"][state.batch] = hvd.size()
            seen["history"][state.batch] = snapshot(state.model, state.optimizer)

    train(state)
    return {**seen, "rank": hvd.rank(), "progress": state.progress, "pid": os.getpid()}


def horovod_script(deaths: dict[int, int], epochs: int, batches_per_commit: int, leave: int, full: int = 0) -> Any:
    """A training as scripts written for Horovod have it: with commits, a sampler and a reset callback.

    Args:
        deaths: by number of the slot, how many batches its first process trains before it ends itself.
        epochs: how many there are at least, with ``full`` ranks at the end of the last one.
        batches_per_commit: how many.
        leave: number of the slot whose process gets SIGTERM after its third batch; -1 for none.
        full: see ``epochs``; 0 for any number.

    Returns:
        Epochs, resets and parameters that this process has seen.
    """
    hvd.init()
    torch.manual_seed(hvd.rank())
    slot = int(os.environ["HOROVOD_SLOT"])
    dataset = torch.arange(61)
    used: dict[int, list[int]] = {}
    seen: dict[str, Any] = {"resets": [], "left": []}
    trained = [0]

    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size()))
    train_sampler = hvd.elastic.ElasticSampler(dataset)
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=train_sampler)

    @hvd.elastic.run
    def full_train(state: Any) -> None:
        while state.epoch < epochs or (full and state.last_size < full):
            for batch_idx, data in enumerate(train_loader):
                optimizer.zero_grad()
                model(data[:, None].float() / 61).square().mean().backward()
                optimizer.step()
                # Every rank tells its samples, so that a later rank 0 knows all of the epoch.
                everybody = hvd.allgather_object(data.tolist())
                state.used = state.used + [sample for each in everybody for sample in each]
                state.train_sampler.record_batch(batch_idx, 2)
                trained[0] += 1
                if deaths.get(slot) == trained[0] and context.membership().number == 1:
                    end_here()
                if leave == slot and trained[0] == 3 and context.membership().number == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                state.batch += 1
                if state.batch % batches_per_commit == 0:
                    state.commit()
            used[state.epoch] = state.used
            state.used = []
            state.epoch, state.last_size = state.epoch + 1, hvd.size()
            state.train_sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(
        model, optimizer, train_sampler=train_sampler, epoch=0, batch=0, used=[], last_size=0
    )
    state.register_reset_callbacks([lambda: seen["resets"].append(hvd.size())])
    hvd.on_leave(lambda: seen["left"].append("told"))
    try:
        full_train(state)
    except SystemExit as left:
        return {**seen, "code": left.code}
    return {
        **seen,
        "used": used,
        "size": hvd.size(),
        "epochs": state.epoch,
        "model": [p.tolist() for p in model.parameters()],
    }


def kept_things(victim: int, host: bool) -> Any:
    """Lose a rank while there are process sets, tensors of the arena, open handles, and perhaps shards of an optimizer.

    Args:
        victim: number of the slot whose process ends itself after a commit.
        host: whether the optimizer has shards.
    """
    even, alone, twin = hvd.ProcessSet([0, 2, 3]), hvd.ProcessSet([victim]), hvd.ProcessSet([0, 3])
    hvd.init(process_sets=[even, twin])
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 5)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), host_optimizer=host)
    seen: dict[str, Any] = {}
    kept: dict[str, Any] = {}

    @hvd.elastic.run
    def train(state: Any) -> None:
        late = hvd.add_process_set([1, hvd.size() - 1])
        if not state.batch:
            hvd.add_process_set(alone)
            kept["arena"] = hvd.zeros(1000)
            kept["arena"] += hvd.rank()
            for state.batch in range(1, 4):
                train_on_linear(model, optimizer)
            state.commit()
            seen["model"] = [p.tolist() for p in model.parameters()]
            seen["adam"] = state._handlers["optimizer"]._saved["state"]
            train_on_linear(model, optimizer)
            kept["handle"] = hvd.allreduce_async(torch.ones(3), name="open")
            if int(os.environ["HOROVOD_SLOT"]) == victim:
                end_here()
            hvd.barrier()
        seen["restored"] = [p.tolist() for p in model.parameters()]
        train_on_linear(model, optimizer)
        seen["sets"] = [even.ranks, even.included(), late.ranks, twin.ranks]
        seen["numbers"] = [each.process_set_id for each in (even, alone, twin, late)]
        seen["count"] = len(process_sets._registry.entries)
        seen["sum"] = hvd.allreduce(kept["arena"], op=hvd.Sum)[0].item()
        if even.included():
            handles = [
                hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum, process_set=each) for each in (even, twin)
            ]
            seen["even"] = [hvd.synchronize(handle)[0].item() for handle in handles]
        newest = hvd.add_process_set([0, 1])
        hvd.remove_process_set(twin)
        seen["after"] = [even.process_set_id, twin.process_set_id, newest.process_set_id, newest.ranks]
        for name, call in (
            ("alone", lambda: hvd.allreduce(torch.ones(2), process_set=alone)),
            ("handle", lambda: hvd.synchronize(kept["handle"])),
        ):
            try:
                call()
            except ValueError as error:
                seen[name] = str(error)
        hvd.barrier()
        seen["final"] = [p.tolist() for p in model.parameters()]

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    train(state)
    return {**seen, "rank": hvd.rank()}


def train_on_linear(model: torch.nn.Module, optimizer: Any) -> None:
    """One step, the same on all ranks."""
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def linear_from(weights: Any, adam_state: Any) -> Any:
    """One step of a plain optimizer from given values on."""
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(values))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": adam_state})
    train_on_linear(model, optimizer)
    return [p.tolist() for p in model.parameters()]


def gathered_shards(place: str) -> Any:
    """Lose the process of slot 1 when it has a part of an optimizer's state.

    Args:
        place: as the parts are gathered, in a "commit" or when slot 2 is to "leave"; or "between" two steps.

    Returns:
        Parameters after eight steps, and where each generation began; None for the process that has left.
    """
    slot = int(os.environ.get("HOROVOD_SLOT", "0"))
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 5)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    if place:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), host_optimizer=True)
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    begun: list[int] = []

    def compute(state: Any) -> None:
        train_on_linear(model, optimizer)
        state.batch += 1

    step = hvd.elastic.step(compute) if place in ("leave", "between") else compute

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun.append(state.batch)
        # Until the ranks hear of the one that leaves, they train on, and go back then.
        while state.batch < 8 or (place == "leave" and context.membership().number == 1):
            if slot and state.batch == 4 and context.membership().number == 1:
                if slot == 1 and place == "between":
                    end_here()
                elif slot == 1:
                    optimizer._whole_state = optimizer._whole_state_dict = end_here
                elif slot == 2 and place == "leave":
                    os.kill(os.getpid(), signal.SIGTERM)
            hvd.barrier()
            step(state)
            if state.batch == 2 or (place == "commit" and state.batch % 3 == 2):
                state.commit()

    try:
        train(state)
    except SystemExit:
        return None
    return [p.tolist() for p in model.parameters()], begun
