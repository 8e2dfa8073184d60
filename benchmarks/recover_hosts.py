"""How long a job of two hosts (network namespaces) stands still when it loses a rank, or a host; needs root.

python benchmarks/recover_hosts.py [--rounds 3] [--json FILE]

The training is that of ``recover.py``, two ranks on each host. A rank gets SIGKILL; a host loses its cable
and then all its processes, so that nobody tells the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from namespaces import Cluster, why_not  # noqa: E402  found by the line above

from benchmarks.recover import (  # noqa: E402
    STEPS_BEFORE,
    await_that,
    horovodrun,
    started,
    steps_in,
    usual_of,
    worker_command,
)

_RANKS = 4


def _lose(cluster: Cluster, is_host: bool) -> float:
    """Run a job, lose a rank of host b or all of it, and return for how long the others stood still, in seconds."""
    flags = ("-H", "a:2,b:2", "--min-np", "2", "--blacklist-cooldown-range", "3600", "3600")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = horovodrun(_RANKS, *flags) + worker_command("khorovod", folder)
        with started([(cluster.machines["login"].command(*command), {})]):

            def are_at_work() -> bool:
                steps = steps_in(folder).values()
                return sum(len(own) >= STEPS_BEFORE and own[-1].size == _RANKS for own in steps) == _RANKS

            await_that("all steps before", are_at_work)
            before = steps_in(folder)
            lost = sorted(key for key in before if key.startswith("b-"))
            if is_host:
                cluster.cut("b")
                lost_s = time.time()
                cluster.crash("b")
            else:
                lost = lost[-1:]
                (folder / f"{lost[0]}.end").touch()
            left = _RANKS - len(lost)

            def after() -> list[float]:
                firsts = [[step for step in own if step.size == left] for own in steps_in(folder).values()]
                return [own[0].at_s for own in firsts if own]

            await_that("steps without those that are lost", lambda: len(after()) == left)
            if not is_host:
                lost_s = steps_in(folder)[lost[0]][-1].at_s
            survivor = next(key for key in before if key not in lost)
            return max(after()) - lost_s - usual_of(before[survivor])


def main() -> int:
    """Measure, print, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why := why_not():
        parser.error(why)
    found = {}
    for name, is_host in (("rank", False), ("host", True)):
        rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
                rounds.append(_lose(cluster, is_host))
                print(name, rounds[-1], file=sys.stderr, flush=True)
        found[f"{name} lost of two hosts, s"] = median(rounds)
        print(f"{name} lost of two hosts: {median(rounds):.2f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
