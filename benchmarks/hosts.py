"""Cost of several hosts, which are network namespaces of this machine, beside Gloo, Open MPI and MPICH.

    sudo .venv/bin/python benchmarks/hosts.py [PART...]

Each part is measured in one run with its peers, and compared with what it is to reach. Needs root, ``ip``, ``tc`` and
``sshd``, as the tests of several hosts do, and Open MPI and MPICH where ``make test`` has put them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from namespaces import Cluster, why_not  # noqa: E402  found by the line above

RATE = 1_000_000_000
SIZE = 64 << 20
HOSTS = ("-np", "4", "-H", "a:2,b:2")
PYTHON = sys.executable
RANK = "import horovod.torch as hvd; hvd.init(); hvd.barrier(); hvd.shutdown()"
STARTS = 5
Row = dict[str, Any]


class Bench:
    """Runs ``horovod.bench`` and jobs on host a of a cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.commands: list[str] = []

    def run(self, *words: str) -> Any:
        """Return the result of one ``horovod.bench``."""
        file = self._folder / "result.json"
        command = "python -m horovod.bench " + " ".join(words)
        self.commands.append(command)
        on_a = self._cluster.machines["a"].command
        # Its usual way to another host is one that namespaces of one machine only seem to have.
        bench = on_a("env", "UCX_TLS=tcp,self", PYTHON, "-m", "horovod.bench", *words, "--json", str(file))
        subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text()) | {"command": command}

    def start(self, hosts: str) -> float:
        """Return the seconds that a job of two ranks takes which only starts and ends."""
        launcher = "import sys; from horovod.launch.cli import main; sys.exit(main())"
        words = [PYTHON, "-c", launcher, "-np", "2", "-H", hosts, PYTHON, "-c", RANK]
        began = time.perf_counter()
        subprocess.run(self._cluster.machines["a"].command(*words), check=True, capture_output=True)
        return time.perf_counter() - began

    def shape(self) -> None:
        """Give the cables of the hosts the rate of ``RATE``, in either direction."""
        for name in "ab":
            tc = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{RATE}bit"]
            words = [*tc, "burst", "256kb", "latency", "100ms"]
            subprocess.run(self._cluster.machines[name].command(*words), check=True)


def unshaped(bench: Bench) -> tuple[Any, list[Row]]:
    """An allreduce over cables that are as fast as memory, beside flat Gloo, Open MPI and MPICH."""
    sizes = ("--sizes", f"64,64K,4M,{SIZE}", "--rounds", "3")
    result = bench.run("allreduce", *HOSTS, "--arena", "--against", "gloo,openmpi,mpich", *sizes)
    rows = []
    for row in result["rows"]:
        for ours in ("horovod", "horovod arena"):
            for peer, ratio in row["ratios"].get(ours, {}).items():
                limit = 0.7 if row["nbytes"] == SIZE else 1.0 if (row["nbytes"], peer) == (64, "gloo") else None
                what = f"allreduce of {row['nbytes']} B, {ours} / {peer}"
                rows.append({"what": what, "is": 1 / ratio, "limit": limit if peer != "mpich" else None})
    return result, rows


def alone(bench: Bench) -> tuple[Any, list[Row]]:
    """An allreduce of two ranks on two hosts, over cables that are as fast as memory."""
    peers = ["gloo", *(f"{flavour}=.mpi/{flavour}" for flavour in ("openmpi", "mpich"))]
    sizes = ("--sizes", f"64,64K,1M,{SIZE // 4}", "--rounds", "2")
    result = bench.run("allreduce", "-np", "2", "-H", "a:1,b:1", "--against", ",".join(peers), *sizes)
    limits = {64: 0.6, 64 << 10: 1.0}
    return result, [
        {"what": f"allreduce of {row['nbytes']} B, one rank per host, horovod / {peer}", "is": 1 / ratio,
         "limit": limits.get(row["nbytes"], 1.05) if peer == "gloo" else None}
        for row in result["rows"] for peer, ratio in row["ratios"]["horovod"].items()
    ]  # fmt: skip


def shaped(bench: Bench) -> tuple[Any, list[Row]]:
    """The same over 1 Gbit/s, compared with the time that the bytes of one rank take on the wire."""
    bench.shape()
    sizes = ("--sizes", str(SIZE), "--rounds", "2")
    result = bench.run("allreduce", *HOSTS, "--arena", "--against", "gloo", *sizes)
    wire_s, (row,) = SIZE * 8 / RATE, result["rows"]
    limits = {"horovod": 1.1, "horovod arena": 1.1}
    return result, [
        {"what": f"allreduce of {SIZE} B at 1 Gbit/s, {name} / bytes of one rank", "is": one["median_s"] / wire_s,
         "limit": limits.get(name)}
        for name, one in row["results"].items() if name in (*limits, "gloo")
    ]  # fmt: skip


def train(bench: Bench) -> tuple[Any, list[Row]]:
    """A step of training over 1 Gbit/s: what it takes beyond one without communication, beside DDP over Gloo."""
    bench.shape()
    result = bench.run("train", *HOSTS, "--models", "mlp,gpt", "--rounds", "2", "--steps", "2")
    exposed = [{name: one["exposed_s"] for name, one in row["results"].items()} for row in result["rows"]]
    return result, [
        {"what": f"step of {row['model']} beyond no communication, horovod / ddp", "is": one["horovod"] / one["ddp"],
         "limit": 0.75}
        for row, one in zip(result["rows"], exposed, strict=True)
    ]  # fmt: skip


def launch(bench: Bench) -> tuple[Any, list[Row]]:
    """Time of a job of two ranks on two hosts beyond that on one."""
    bench.start("a:2")
    times = [(bench.start("a:2"), bench.start("a:1,b:1")) for _ in range(STARTS)]
    extra_s = median(two - one for one, two in times)
    return {"one_s": [one for one, _ in times], "two_s": [two for _, two in times]}, [
        {"what": "launch of two hosts beyond one, s", "is": extra_s, "limit": 1.0}
    ]


PARTS: dict[str, Callable[[Bench], tuple[Any, list[Row]]]] = {
    "unshaped": unshaped, "alone": alone, "shaped": shaped, "train": train, "launch": launch,
}  # fmt: skip


def main() -> int:
    """Measure; return 1 if a limit is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "hosts", metavar="FOLDER")
    args = parser.parse_args()
    wrong = [name for name in args.parts if name not in PARTS]
    if wrong or why_not():
        parser.error(f"no part {wrong[0]!r}; there are {', '.join(PARTS)}" if wrong else why_not())
    target = args.json.absolute()
    target.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    is_kept = True
    for name in args.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
            bench = Bench(cluster, Path(folder))
            result, rows = PARTS[name](bench)
        file = target / ("1x1.json" if name == "alone" else "2x2.json")
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        found[name] = {"commands": bench.commands, "ratios": rows, "result": result}
        file.write_text(json.dumps(found, indent=1) + "\n")
        for row in rows:
            limit, verdict = row["limit"], ""
            if limit is not None:
                verdict = f"  to reach: {limit:g}{'' if row['is'] <= limit else '  NOT REACHED'}"
                is_kept = is_kept and row["is"] <= limit
            print(f"{row['what']:66s} {row['is']:7.2f}{verdict}", flush=True)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
