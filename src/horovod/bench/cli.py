"""What the user typed after ``python -m horovod.bench``, and who carries it out."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod.bench.cases import DEFAULT_SIZES, DTYPES, FRAMEWORKS, MODELS, OPS, PEERS, parse_sizes
from horovod.bench.events import LineReporter, Reporter, progress, result
from horovod.bench.host import host_facts
from horovod.bench.show import show, show_files
from horovod.world import detect

__all__ = ["main", "parse"]

_RANKS = {"torch": "horovod.bench.rank"}
_DEFAULT = ("allreduce", "--arena", "--against", ",".join(PEERS))


def _list_of(allowed: Sequence[str], *, may_have_value: bool = False) -> Any:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if (name.partition("=")[0] if may_have_value else name) not in allowed:
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(allowed)}")
        return names

    return read


def _read(function: Any) -> Any:
    """Give argparse the words of the ValueError, which it would hide."""

    def read(text: str) -> Any:
        try:
            return function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} is below 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m horovod.bench",
        description="Measure horovod on this machine, beside its alternatives and in the same run. "
        "Starts its own ranks (-np), or runs in those of a launcher: horovodrun -np 2 python -m horovod.bench …",
        epilog=f"Without WHAT: {' '.join(_DEFAULT)}.",
    )
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("-H", "--hosts", default="", metavar="A:2,B:2", help="where to start them; this host when omitted")
    add("-np", "--np", type=_read(_positive), default=2, help="ranks to start when no launcher did (default 2)")
    add("--json", type=Path, metavar="FILE", help="write the result, the host's facts and the command")
    add("--plot", type=Path, metavar="FILE", help="draw the result as SVG")
    add("--rounds", type=_read(_positive), default=7, help="how often the contenders take turns (default 7)")
    add("--threads", type=int, default=0, help="torch threads per rank (default: cores / ranks, at least 1)")
    add("--events", action="store_true", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    for op in OPS:
        _add_collective(commands, op, common)
    train = commands.add_parser("train", parents=[common], help="a training step, against DDP and no communication")
    _add_framework(train)
    train.add_argument("--steps", type=_read(_positive), default=3, help="timed steps of one turn (default 3)")
    observed = commands.add_parser("timeline", parents=[common], help="what a timeline adds to a training step")
    observed.add_argument("--steps", type=_read(_positive), default=5, help="timed steps of one turn (default 5)")
    sharding = commands.add_parser("optimizer", parents=[common], help="AdamW with its state on all ranks, and shared")
    sharding.add_argument("--steps", type=_read(_positive), default=3, help="timed steps of one turn (default 3)")
    memory = commands.add_parser("memory", parents=[common], help="bytes per rank beyond model and gradients")
    for command in (train, observed, sharding, memory):
        command.add_argument("--models", type=_list_of(MODELS), default=MODELS, help="of mlp,resnet,gpt (default all)")
        command.add_argument("--tiny", action="store_true", help="tiny models: only to see that it runs")
    parts = commands.add_parser("profile", parents=[common], help="where the time of an allreduce goes")
    parts.add_argument(
        "--sizes",
        type=_read(parse_sizes),
        default="64,64K,1M,4M,64M",
        help="bytes of a tensor (default 64,64K,1M,4M,64M)",
    )
    commands.add_parser("startup", parents=[common], help="import, launch, init, shutdown, against torchrun")
    idle = commands.add_parser("idle", parents=[common], help="CPU of an initialised job that does nothing")
    idle.add_argument("--seconds", type=float, default=10.0, help="how long to watch (default 10)")
    control = commands.add_parser(
        "control", parents=[common], help="cost of agreeing, for simulated ranks on many hosts"
    )
    control.add_argument("--ranks", type=_read(_positive), default=512, help="of the simulated job (default 512)")
    control.add_argument("--per-host", type=_read(_positive), default=8, help="of them on each host (default 8)")
    control.add_argument("--tensors", type=_read(_positive), default=200, help="that each rank has (default 200)")
    saved = commands.add_parser("show", help="print results that --json wrote")
    saved.add_argument("files", nargs="+", type=Path, metavar="FILE")
    saved.add_argument("--markdown", action="store_true", help="as tables for a page")
    return parser


def _add_framework(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        default="torch",
        help="whose tensors to measure, beside what that framework offers itself (default torch)",
    )


def _add_collective(commands: Any, op: str, common: argparse.ArgumentParser) -> None:
    texts = {
        "async": "many allreduces at once, then synchronize",
        "allreduce-new": "allreduce into a new tensor by size",
    }
    text = texts.get(op, f"{op} by size")
    command = commands.add_parser(op, parents=[common], help=text)
    command.add_argument(
        "--sizes",
        type=_read(parse_sizes),
        default="1M" if op == "async" else DEFAULT_SIZES,
        help="bytes of one rank's input, such as 64,64K,4M or 64:256M",
    )
    if op == "allreduce":
        _add_framework(command)
    command.add_argument(
        "--dtype", type=_list_of(tuple(DTYPES)), default=("float32",), help=f"of {','.join(DTYPES)} (default float32)"
    )
    command.add_argument("--arena", action="store_true", help="measure tensors in the arena (hvd.empty) as well")
    command.add_argument(
        "--against",
        type=_list_of(PEERS, may_have_value=True),
        default=(),
        help=f"peers, of {','.join(PEERS)}; mpich=DIR names where it is installed",
    )
    command.add_argument(
        "--round-ms", type=float, default=50.0, help="length of one turn, in milliseconds (default 50)"
    )
    command.add_argument("--batch", type=_read(_positive), default=50 if op == "async" else 1, help=argparse.SUPPRESS)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with a message when it is wrong."""
    return _parser().parse_args(_complete(argv))


def _complete(argv: Sequence[str]) -> list[str]:
    """Put the usual WHAT before flags that stand alone."""
    has_what = bool(argv) and (not argv[0].startswith("-") or argv[0] in ("-h", "--help"))
    return [*argv] if has_what else [*_DEFAULT, *argv]


def _packages(framework: str) -> list[str]:
    """What must be installed for a framework to be measured."""
    if framework == "keras":
        return ["keras", os.environ.get("KERAS_BACKEND", "tensorflow")]
    return [framework]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark: in this rank, in ranks that it starts, or, for those that start jobs, from here.

    Returns:
        The exit status.
    """
    typed = _complete(sys.argv[1:] if argv is None else argv)
    args = parse(typed)
    if args.command == "show":
        return show_files(args.files, as_markdown=args.markdown)
    framework = getattr(args, "framework", "torch")
    missing = [package for package in _packages(framework) if importlib.util.find_spec(package) is None]
    if missing:
        print(f"horovod.bench needs {missing[0]}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    world = detect()
    launched = args.events or world.launcher != "none"
    if args.command in ("startup", "memory", "control"):
        # These start jobs of their own, or none; of a job that they were started in they need only its size.
        ranks = world.size if launched else args.np
        return show(args, lambda report: _from_outside(args, ranks, typed, report)) if world.rank == 0 else 0
    if not launched:
        from horovod.bench.jobs import horovodrun, run_job

        command = horovodrun(args.np, ["-m", "horovod.bench", *typed, "--events"], args.hosts)
        return show(args, lambda report: run_job(command, report))
    run_rank = importlib.import_module(_RANKS.get(framework, "horovod.bench.framework_rank")).run_rank
    if world.rank != 0:
        return int(run_rank(args, typed, lambda event: None))
    if args.events:
        return int(run_rank(args, typed, LineReporter()))
    return show(args, lambda report: run_rank(args, typed, report))


def _from_outside(args: argparse.Namespace, ranks: int, typed: list[str], report: Reporter) -> int:
    host = host_facts()
    rows: list[dict[str, Any]]
    if args.command == "startup":
        from horovod.bench.startup import run_startup

        rows = run_startup(ranks, progress(report), rounds=args.rounds)
    elif args.command == "control":
        from horovod.bench.coordination import run_control

        ranks, hosts = args.ranks, args.ranks // args.per_host
        if hosts < 2 or ranks % args.per_host:
            print(f"horovod.bench control: {ranks} ranks are not several hosts of {args.per_host}", file=sys.stderr)
            return 2
        rows = run_control(ranks, hosts, args.tensors, progress(report))
    else:
        from horovod.bench.memory import run_memory

        rows = run_memory(args.models, ranks, progress(report), tiny=args.tiny)
    report(result(args.command, typed, ranks, host, rows))
    return 0
