"""One rank's part of a benchmark of a framework other than torch.

A framework is a module ``horovod.bench.on_FRAMEWORK`` with ``contenders(control)``, ``make_task(name, rank, tiny=...)``
and ``arms(control)``, the first of which trains without communication; where it has backends, ``BACKEND`` names one.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import horovod.numpy as hvd
from horovod.bench.cases import OPS, Case
from horovod.bench.collective import Plan, run_cases
from horovod.bench.control import HorovodControl
from horovod.bench.events import Reporter, progress, result
from horovod.bench.host import Load, host_facts, others_cores
from horovod.bench.stepping import run_train

__all__ = ["run_rank"]


def run_rank(args: argparse.Namespace, typed: list[str], report: Reporter) -> int:
    """Carry the benchmark out with the other ranks of this job.

    Args:
        args: what was typed, parsed.
        typed: what was typed.
        report: hears of progress and the result; only rank 0's counts.

    Returns:
        0; whatever goes wrong is raised.
    """
    host, start = host_facts(), Load.now()
    framework: Any = importlib.import_module(f"horovod.bench.on_{args.framework}")
    hvd.init()
    control, tell = HorovodControl(hvd), progress(report)
    rows: list[dict[str, Any]]
    if args.command in OPS:
        cases = [Case(args.command, nbytes, dtype) for dtype in args.dtype for nbytes in args.sizes]
        contenders = framework.contenders(control)
        rows = run_cases(cases, contenders, control, Plan(args.rounds, args.round_ms / 1000), tell)
        for each in reversed(contenders):
            each.close()
    else:
        rows = run_train(
            args.models, framework.make_task, framework.arms(control), control, tell, rounds=args.rounds,
            steps=args.steps, tiny=args.tiny,
        )  # fmt: skip
    used = Load.now().since(start)
    others = others_cores(used, sum(control.gather(used.own_s)))
    whose = {"framework": args.framework}
    if hasattr(framework, "BACKEND"):
        whose["backend"] = framework.BACKEND
    report(result(args.command, typed, control.size, host, rows, **whose, others_cores=others))
    hvd.shutdown()
    return 0
