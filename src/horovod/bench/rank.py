"""One rank's part of a benchmark that runs inside a job."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

import horovod.torch as hvd
from horovod.bench.bandwidth import Sweep
from horovod.bench.cases import OPS, Case
from horovod.bench.collective import Plan, run_cases
from horovod.bench.control import Contender, Control, HorovodControl
from horovod.bench.events import Reporter, progress, result
from horovod.bench.gloo import Gloo, start_gloo, stop_gloo
from horovod.bench.host import Load, cores, host_facts, others_cores
from horovod.bench.idle import run_idle
from horovod.bench.models import make_task
from horovod.bench.mpi import Mpi
from horovod.bench.observed import run_observed
from horovod.bench.ours import Ours
from horovod.bench.profile import run_profile
from horovod.bench.sharding import run_optimizer
from horovod.bench.siblings import core_facts, slowdown, stolen_share
from horovod.bench.stepping import run_train
from horovod.bench.train import ddp_arm, horovod_arm, local_arm

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
    hvd.init()
    control = HorovodControl(hvd)
    torch.set_num_threads(args.threads or max(1, cores() // hvd.local_size()))
    more: dict[str, Any] = {"threads": torch.get_num_threads()}
    tell = progress(report)
    if args.command in OPS:
        rows = _collectives(args, control, report)
    elif args.command == "train":
        start_gloo(control)
        arms = (local_arm, horovod_arm, ddp_arm)
        rows = run_train(
            args.models, make_task, arms, control, tell, rounds=args.rounds, steps=args.steps, tiny=args.tiny
        )
        stop_gloo(control)
    elif args.command == "optimizer":
        start_gloo(control)
        rows = run_optimizer(args.models, control, tell, rounds=args.rounds, steps=args.steps, tiny=args.tiny)
        stop_gloo(control)
    elif args.command == "timeline":
        rows = run_observed(args.models, hvd, control, tell, rounds=args.rounds, steps=args.steps, tiny=args.tiny)
    elif args.command == "profile":
        rows = run_profile(args.sizes, control, tell, rounds=args.rounds)
        more["cores"] = core_facts(control) | {"slowdown": slowdown(control, args.rounds)}
    else:
        rows = run_idle(control, tell, seconds=args.seconds)
    used = Load.now().since(start)
    more["others_cores"] = others_cores(used, sum(control.gather(used.own_s)))
    if "cores" in more:
        more["cores"]["stolen"] = stolen_share(used, os.cpu_count() or 1)
    report(result(args.command, typed, control.size, host, rows, **more))
    hvd.shutdown()
    return 0


def _collectives(args: argparse.Namespace, control: Control, report: Reporter) -> list[dict[str, Any]]:
    contenders: list[Contender] = [Sweep(control), Ours(control)]
    if args.arena:
        contenders.append(Ours(control, arena=True))
    for peer in args.against:
        flavour, _, prefix = peer.partition("=")
        contenders.append(Gloo(control) if flavour == "gloo" else Mpi(flavour, control, prefix))
    cases = [Case(args.command, nbytes, dtype, args.batch) for dtype in args.dtype for nbytes in args.sizes]
    plan = Plan(rounds=args.rounds, round_s=args.round_ms / 1000)
    rows = run_cases(cases, contenders, control, plan, progress(report))
    for each in reversed(contenders):
        each.close()
    return rows
