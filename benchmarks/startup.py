"""Time from command to end: imports, launching, init() and shutdown(), beside torchrun with Gloo.

python benchmarks/startup.py [RANKS [ROUNDS]]
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

HOROVOD = "import horovod.torch as hvd; hvd.init(); hvd.shutdown()"
GLOO = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()"


def main(ranks: int, rounds: int) -> None:
    """Run each command in turn, and print the median of its times."""
    python = [sys.executable, "-c"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    horovodrun = [sys.executable, "-m", "horovod.launch.cli", "-np", str(ranks), *python]
    commands = {
        "python -c pass": [*python, "pass"],
        "import horovod": [*python, "import horovod"],
        "import torch": [*python, "import torch"],
        "import horovod.torch": [*python, "import horovod.torch"],
        "horovodrun python -c pass": [*horovodrun, "pass"],
        "horovodrun, whole job": [*horovodrun, HOROVOD],
        "torchrun with gloo, whole job": [*torchrun, "--no-python", sys.executable, "-c", GLOO],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, timeout=300, capture_output=True)
            times[name].append(time.perf_counter() - start)
    for name, spent in times.items():
        print(f"{name:32s} {median(spent):7.3f} s")


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["2", "5"][len(sys.argv) - 1 :])))
