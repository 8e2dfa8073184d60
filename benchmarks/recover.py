"""How long a job stands still when a rank is killed, beside torchrun and torchft; cost of protection; time of init().

python benchmarks/recover.py [kill|join|protect|init ...] [--ranks 4] [--rounds 3] [--json FILE]

Each system trains an MLP of 25 million parameters with SGD. When all ranks have done some steps, one gets SIGKILL. The
result is the time until the last of the others has completed its next step in the new membership, beyond a usual step.
torchrun restarts all ranks, which load the checkpoint of the last step; torchft needs its package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_WIDTH, _LAYERS, _BATCH = 2500, 4, 8
STEPS_BEFORE, _STEPS_AFTER, _LIMIT_S = 12, 3, 150.0
_INITS, _PROTECTED_STEPS = 20, 60


# -- the ranks -------------------------------------------------------------------------------------------------------


def _model() -> tuple[Any, Any, Callable[[], Any]]:
    """Return a model of 25 million parameters, an optimizer, and what returns the loss of the next batch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)])
    data = torch.randn(_BATCH, _WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), lambda: model(data).square().mean()


class _Log:
    """Notes each completed step of this process in a file of its own: time, number of ranks, step.

    Where there is a file that says so, it then kills the process.
    """

    def __init__(self, folder: str) -> None:
        name = f"{os.uname().nodename}-{os.getpid()}"
        self._file = (Path(folder) / f"{name}.log").open("w", buffering=1)
        self._end = Path(folder) / f"{name}.end"

    def step(self, size: int, number: int) -> None:
        self._file.write(f"{time.time()} {size} {number}\n")
        if self._end.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def _khorovod(folder: str) -> None:
    import horovod.torch as hvd

    log = _Log(folder)
    hvd.init()
    model, optimizer, loss_of = _model()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    @hvd.elastic.step
    def step(state: Any) -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not (Path(folder) / "end").exists():
            step(state)
            log.step(hvd.size(), state.progress)

    train(state)


def _torchrun(folder: str) -> None:
    import torch
    from torch import distributed

    log, checkpoint = _Log(folder), Path(folder) / "checkpoint.pt"
    # A store of its own for each attempt: with torchrun's, restarted ranks call ports of those that are gone.
    attempt, ranks = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
    store = distributed.FileStore(f"{folder}/store-{attempt}", ranks)
    distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=ranks)
    model, optimizer, _ = _model()
    number = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        number = saved["step"]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    data = torch.randn(_BATCH, _WIDTH)
    while not (Path(folder) / "end").exists():
        optimizer.zero_grad()
        parallel(data).square().mean().backward()
        optimizer.step()
        number += 1
        if distributed.get_rank() == 0:
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "step": number}, part)
            part.replace(checkpoint)
        log.step(distributed.get_world_size(), number)


def _torchft(folder: str) -> None:
    import torch
    import torchft
    from torchft.ddp import PureDistributedDataParallel

    log = _Log(folder)
    model, sgd, _ = _model()

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["optimizer"])

    # torchrun would have it; the manager only calls it.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        replica_id=f"recover_{os.environ['REPLICA_GROUP_ID']}",
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    # The hook of torchft's DistributedDataParallel fails an assertion when a replica is lost (0.2.0 with torch 2.13).
    parallel = PureDistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, sgd)
    data = torch.randn(_BATCH, _WIDTH)
    while not (Path(folder) / "end").exists():
        before = manager.current_step()
        optimizer.zero_grad()
        parallel(data).square().mean().backward()
        optimizer.step()
        if manager.current_step() > before:
            log.step(manager.num_participants(), manager.current_step())
    manager.shutdown(wait=False)


def _init(folder: str) -> None:
    import horovod.numpy as hvd

    hvd.init()
    spent = []
    for _ in range(_INITS):
        hvd.barrier()
        hvd.shutdown()
        begun = time.monotonic()
        hvd.init()
        spent.append(time.monotonic() - begun)
    slowest = hvd.allgather_object(spent)
    if hvd.rank() == 0:
        # The last to leave is waited for by all others.
        (Path(folder) / "init.json").write_text(json.dumps([min(times) for times in zip(*slowest, strict=True)]))


def _protect(folder: str) -> None:
    import horovod.torch as hvd

    hvd.init()
    model, optimizer, loss_of = _model()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    def plain(state: Any) -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    protected = hvd.elastic.step(plain)

    @hvd.elastic.run
    def train(state: Any) -> None:
        spent: dict[str, list[float]] = {"plain": [], "protected": []}
        for number in range(2 * _PROTECTED_STEPS):
            begun = time.monotonic()
            (protected if number % 2 else plain)(state)
            spent["protected" if number % 2 else "plain"].append(time.monotonic() - begun)
        if hvd.rank() == 0:
            (Path(folder) / "protect.json").write_text(json.dumps(spent))

    train(state)


_WORKERS: dict[str, Callable[[str], None]] = {
    "khorovod": _khorovod,
    "torchrun": _torchrun,
    "torchft": _torchft,
    "init": _init,
    "protect": _protect,
}


# -- the jobs --------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A completed step of a process."""

    at_s: float
    size: int
    number: int


def worker_command(worker: str, folder: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--worker", worker, str(folder)]


def horovodrun(ranks: int, *more: str) -> list[str]:
    launcher = "import sys; from horovod.launch.cli import main; sys.exit(main())"
    return [sys.executable, "-c", launcher, "-np", str(ranks), *more]


def _commands(system: str, ranks: int, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the processes that make up a job, and what they have in their environment."""
    command = worker_command(system, folder)
    if system == "khorovod":
        flags = ["--min-np", str(ranks - 1), "--blacklist-cooldown-range", "3", "3"]
        return [(horovodrun(ranks, *flags) + command, {})]
    if system == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        return [([*launcher, "--nproc-per-node", str(ranks), "--no-python", *command], {})]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    lighthouse = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)) or "torchft_lighthouse"
    flags = ["--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]
    jobs: list[tuple[list[str], dict[str, str]]] = [([lighthouse, *flags], {})]
    for rank in range(ranks):
        more = {"REPLICA_GROUP_ID": str(rank), "NUM_REPLICA_GROUPS": str(ranks), "RANK": "0", "WORLD_SIZE": "1"}
        jobs.append((command, {**more, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}))
    return jobs


@contextlib.contextmanager
def started(jobs: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[None]:
    running = []
    try:
        for command, env in jobs:
            running.append(
                subprocess.Popen(
                    command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=None if os.environ.get("RECOVER_VERBOSE") else subprocess.DEVNULL,
                )
            )  # fmt: skip
        yield
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def steps_in(folder: Path) -> dict[str, list[Step]]:
    """Return the steps of each process, by its host and process id."""
    found = {}
    for path in folder.glob("*.log"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[path.stem] = [Step(float(at), int(size), int(number)) for at, size, number in lines]
    return found


def await_that(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {_LIMIT_S:g} s")
        time.sleep(0.02)


def usual_of(steps: Sequence[Step]) -> float:
    times = [step.at_s for step in steps]
    return median(later - earlier for earlier, later in itertools.pairwise(times[2:]))


def _kill(system: str, ranks: int, with_join: bool) -> dict[str, float]:
    """Run a job, kill a rank of it, and return how long the others stood still, and a usual step, in seconds."""
    with tempfile.TemporaryDirectory() as name, started(_commands(system, ranks, Path(name))):
        folder = Path(name)

        def at_work() -> list[list[Step]]:
            return [steps for steps in steps_in(folder).values() if len(steps) >= STEPS_BEFORE]

        await_that(
            f"{STEPS_BEFORE} steps of {system}", lambda: len(at_work()) == ranks and at_work()[0][-1].size == ranks
        )
        before = steps_in(folder)
        victim = max(before)
        killed_s = time.time()
        os.kill(int(victim.rpartition("-")[2]), signal.SIGKILL)

        def after() -> list[Step]:
            """The first step of each rank in the new membership."""
            found = []
            for pid, steps in steps_in(folder).items():
                is_new = system == "torchrun" and pid not in before
                later = [step for step in steps if step.at_s > killed_s and (is_new or step.size == ranks - 1)]
                found += later[:1]
            return found

        left = ranks if system == "torchrun" else ranks - 1
        await_that(f"a step of {system} without the rank", lambda: len(after()) >= left)
        usual_s = usual_of(before[min(before)])
        found = {"lost_s": max(step.at_s for step in after()) - killed_s - usual_s, "step_s": usual_s}
        if with_join:
            survivor = next(pid for pid in before if pid != victim)

            def joined() -> int:
                sizes = [step.size for step in steps_in(folder)[survivor]]
                return next((i for i in range(1, len(sizes)) if sizes[i - 1] < sizes[i] == ranks), 0)

            await_that("a rank that joins", lambda: joined() > 0)
            steps = steps_in(folder)[survivor]
            found["join_s"] = steps[joined()].at_s - steps[joined() - 1].at_s - usual_s
        return found


def _once(worker: str, ranks: int, *flags: str) -> Any:
    """Run a job to its end, and return what it has written."""
    with tempfile.TemporaryDirectory() as name:
        command = horovodrun(ranks, *flags) + worker_command(worker, Path(name))
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL)
        return json.loads((Path(name) / f"{worker}.json").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what was asked for, print it, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="kill, join, protect, init; all when omitted")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default="khorovod,torchrun", help="torchft as well, if it is installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        _WORKERS[options.worker[0]](options.worker[1])
        return 0
    # Without a handler the jobs, which have sessions of their own, would stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("recover: ended by SIGTERM"))
    wanted, found = options.what or ["kill", "join", "protect", "init"], dict[str, float]()
    if "kill" in wanted or "join" in wanted:
        systems = [name for name in options.systems.split(",") if name != "torchft" or importlib.util.find_spec(name)]
        rounds: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
        for _ in range(options.rounds):
            for system in systems:
                rounds[system].append(_kill(system, options.ranks, "join" in wanted and system == "khorovod"))
                print(system, rounds[system][-1], file=sys.stderr, flush=True)
        for system, results in rounds.items():
            for key in results[0]:
                found[f"{system} {key}"] = median(result[key] for result in results)
    if "protect" in wanted:
        spent = _once("protect", options.ranks, "--min-np", "2")
        found["protected step / plain step"] = median(spent["protected"]) / median(spent["plain"])
    if "init" in wanted:
        for ranks in (2, 4, 8, 16):
            found[f"init of {ranks} ranks, s"] = median(_once("init", ranks))
    for name, value in found.items():
        print(f"{name:32s} {value:8.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
