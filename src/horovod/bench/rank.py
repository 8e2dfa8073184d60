"""One rank's part of a benchmark."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

from horovod.bench.cases import OPS, Case
from horovod.bench.collective import run_cases
from horovod.bench.control import Agreement, Tell
from horovod.bench.host import cores, host_facts
from horovod.bench.stepping import run_train

__all__ = ["run_rank"]

#: Seconds between two lines of progress.
_LINE_S = 5.0


def run_rank(args: argparse.Namespace, typed: list[str]) -> dict[str, Any]:
    """Run the benchmark together with the other ranks of this job; rank 0 reports progress on stderr. Return the
    result, which goes into the JSON file; only rank 0's counts.
    """
    host = host_facts()
    framework = getattr(args, "framework", "torch")
    more: dict[str, Any] = {}
    module: Any
    hvd: Any
    if framework != "torch":
        # Some peers must start before anything else touches their framework, so only numpy is used here.
        hvd = importlib.import_module("horovod.numpy")
        module = importlib.import_module(f"benchmarks.on_{framework}")
        more["framework"] = framework
        if hasattr(module, "BACKEND"):
            more["backend"] = module.BACKEND
        hvd.init()
    else:
        import torch

        hvd = importlib.import_module("horovod.torch")
        module = importlib.import_module("horovod.bench.on_torch")
        hvd.init()
        torch.set_num_threads(args.threads or max(1, cores() // hvd.local_size()))
        more["threads"] = torch.get_num_threads()
    control = Agreement(hvd)
    rows = _measure(args, module, control, _progress(args.command, is_shown=control.rank == 0))
    hvd.shutdown()
    command = " ".join(["python", "-m", "horovod.bench", *typed])
    return {
        "schema": 1, "kind": args.command, "command": command, "np": control.size, "host": host, **more, "rows": rows,
    }  # fmt: skip


def _progress(command: str, is_shown: bool) -> Tell:
    start = said = time.monotonic()

    def tell(done: int, total: int, text: str) -> None:
        nonlocal said
        now = time.monotonic()
        if is_shown and now - said > _LINE_S:
            said = now
            print(
                f"horovod.bench {command}: {now - start:.0f} s, {done} of {total}: {text}", file=sys.stderr, flush=True
            )

    return tell


def _measure(args: argparse.Namespace, module: Any, control: Agreement, tell: Tell) -> list[dict[str, Any]]:
    """Return the rows of the benchmark; ``module`` is the module of the framework."""
    if args.command == "train":
        scale = {"rounds": args.rounds, "steps": args.steps, "tiny": args.tiny}
        return run_train(args.models, module.make_task, module.arms(control), control, tell, **scale)
    if args.command == "profile":
        from horovod.bench.profile import run_profile

        return run_profile(args.sizes, control, tell, rounds=args.rounds)
    if args.command == "network":
        from horovod.bench.network import run_network

        return run_network(control, tell, rounds=args.rounds)
    assert args.command in OPS
    cases = [Case(args.command, nbytes, dtype, args.batch) for dtype in args.dtype for nbytes in args.sizes]
    contenders = module.contenders(control, args)
    rows = run_cases(cases, contenders, control, tell, rounds=args.rounds, round_s=args.round_ms / 1000)
    for each in reversed(contenders):
        each.close()
    return rows
