"""The command line ``python -m horovod.bench``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horovod.bench.cases import DEFAULT_SIZES, DTYPES, FRAMEWORKS, MODELS, OPS, PEERS, parse_sizes
from horovod.bench.rank import run_rank
from horovod.bench.report import show
from horovod.errors import LaunchError
from horovod.launch.run import run
from horovod.world import World, detect

__all__ = ["main", "parse"]

_DEFAULT = ("allreduce", "--arena", "--against")


def _list_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of names separated by commas; ``name=value`` counts as ``name``."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if not names and allowed is not PEERS:
            raise argparse.ArgumentTypeError(f"expected at least one of {', '.join(allowed)}")
        for name in names:
            if name not in allowed and not (allowed is PEERS and name.partition("=")[0] in allowed):
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(allowed)}")
        return names

    return read


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_sizes(text)
    except ValueError as error:  # argparse hides the message of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from error


def _at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a reader of finite numbers."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
        return number

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m horovod.bench",
        description="Measure horovod on this machine, beside its alternatives and in the same run. "
        "Starts its own ranks (-np), or runs in those of a launcher: horovodrun -np 2 python -m horovod.bench …",
        epilog=f"Without WHAT: {' '.join(_complete([]))}.",
    )
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("-H", "--hosts", default="", metavar="A:2,B:2", help="hosts to start ranks on; this host when omitted")
    add("-np", "--np", type=_at_least(1), default=2, help="ranks to start when no launcher did (default 2)")
    add("--json", type=Path, metavar="FILE", help="write the result, the host's facts and the command")
    add("--rounds", type=_at_least(1), default=7, help="how often the contenders take turns (default 7)")
    add("--threads", type=_at_least(0), default=0, help="torch threads per rank (default: cores / ranks, at least 1)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    for op in OPS:
        _add_collective(commands, op, common)
    train = commands.add_parser("train", parents=[common], help="a training step, beside DDP and no communication")
    _add_framework(train)
    train.add_argument("--steps", type=_at_least(1), default=3, help="timed steps of one turn (default 3)")
    train.add_argument("--models", type=_list_of(MODELS), default=MODELS, help="of mlp,resnet,gpt (default all)")
    train.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    parts = commands.add_parser("profile", parents=[common], help="the parts of an allreduce, and how long each takes")
    parts.add_argument("--sizes", type=_sizes, default="64,64K,1M,4M,64M", help="bytes of a tensor")
    commands.add_parser("network", parents=[common], help="latency and bandwidth between each two hosts")
    return parser


def _add_framework(command: argparse.ArgumentParser) -> None:
    text = "framework to measure, beside its own collectives (default torch; others need a checkout)"
    command.add_argument("--framework", choices=FRAMEWORKS, default="torch", help=text)


def _add_collective(commands: Any, op: str, common: argparse.ArgumentParser) -> None:
    texts = {
        "async": "many allreduces at once, then synchronize",
        "allreduce-new": "allreduce into a new tensor by size",
    }
    command = commands.add_parser(op, parents=[common], help=texts.get(op, f"{op} by size"))
    add = command.add_argument
    sizes = "1M" if op == "async" else DEFAULT_SIZES
    add("--sizes", type=_sizes, default=sizes, help="bytes of one rank's input, such as 64,64K,4M or 64:256M")
    if op == "allreduce":
        _add_framework(command)
    add("--dtype", type=_list_of(tuple(DTYPES)), default=("float32",), help=f"of {','.join(DTYPES)} (default float32)")
    add("--arena", action="store_true", help="measure tensors in the arena (hvd.empty) as well")
    text = f"peers, of {','.join(PEERS)}; mpich=DIR names where it is installed (MPI needs a checkout)"
    add("--against", type=_list_of(PEERS), default=(), help=text)
    add("--round-ms", type=_at_least(0, float), default=50.0, help="length of one turn, in milliseconds (default 50)")
    add("--batch", type=_at_least(1), default=50 if op == "async" else 1, help=argparse.SUPPRESS)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits with a message when it is wrong."""
    return _parser().parse_args(_complete(argv))


def _complete(argv: Sequence[str]) -> list[str]:
    """Put the usual command before flags that stand alone."""
    has_command = bool(argv) and (not argv[0].startswith("-") or argv[0] in ("-h", "--help"))
    peers = ",".join(PEERS if _is_checkout() else ["gloo"])
    return [*argv] if has_command else [*_DEFAULT, peers, *argv]


def _is_checkout() -> bool:
    return importlib.util.find_spec("benchmarks") is not None


def _problem(args: argparse.Namespace, world: World) -> str:
    """Return why a command cannot run here; empty when it can."""
    framework = getattr(args, "framework", "torch")
    packages = ["keras", os.environ.get("KERAS_BACKEND", "tensorflow")] if framework == "keras" else [framework]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"{missing[0]} is not installed; pip install {' '.join(missing)}"
    peers = [peer for peer in getattr(args, "against", ()) if peer != "gloo"]
    option = f"--framework {framework}" if framework != "torch" else f"--against {peers[0]}" if peers else ""
    if option and not _is_checkout():
        return f"{option} needs the folder benchmarks/; run this in the root of a checkout"
    if args.command == "network" and world.launcher == "none" and "," not in args.hosts:
        return "network measures between hosts; name them with -H a:1,b:1"
    if args.json and world.rank == 0:
        try:
            args.json.open("a").close()
        except OSError as error:
            return f"--json {args.json} cannot be written: {error.strerror}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark, in this rank or in ranks that it starts; return the exit status."""
    typed = _complete(sys.argv[1:] if argv is None else argv)
    args = parse(typed)
    world = detect()
    if problem := _problem(args, world):
        print(f"horovod.bench: {problem}", file=sys.stderr)
        return 2
    if world.launcher != "none":
        result = run_rank(args, typed)
        if world.rank == 0:
            show(result, args.json)
        return 0
    try:
        result, *_ = run(run_rank, (args, typed), num_proc=args.np, hosts=args.hosts or f"localhost:{args.np}")
    except LaunchError as error:
        print(f"horovod.bench {args.command}: {error}", file=sys.stderr)
        return 1
    show(result, args.json)
    return 0
