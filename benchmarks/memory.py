"""Memory per rank that training together costs, beyond model and gradients: horovod beside DDP.

python benchmarks/memory.py [MODEL [RANKS]]

Memory is proportional: pages that several ranks share count once in all. Each way runs in a job of its own.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from statistics import mean

import horovod

WAYS = ("no communication", "horovod", "ddp")
STEPS = 3


def rank(model: str, way: str) -> tuple[int, int]:
    """Train in one way for some steps; return the bytes held, and those of gradients."""
    import torch

    import horovod.torch as hvd
    from horovod.bench.control import Agreement
    from horovod.bench.gloo import start_gloo, stop_gloo
    from horovod.bench.on_torch import ddp_arm, horovod_arm, local_arm, make_task

    torch.set_num_threads(1)
    hvd.init()  # in every way, so that its own memory is not a difference
    control = Agreement(hvd)
    if way == "ddp":
        start_gloo(control)
    task = make_task(model.removeprefix("tiny-"), hvd.rank(), tiny=model.startswith("tiny-"))
    arm = dict(zip(WAYS, (local_arm, horovod_arm, ddp_arm), strict=True))[way](task)
    for _ in range(STEPS):
        arm.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    control.barrier()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    held = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    gradients = sum(weight.grad.nbytes for weight in task.model.parameters() if weight.grad is not None)
    control.barrier()
    if way == "ddp":
        stop_gloo(control)
    hvd.shutdown()
    return held, gradients


def main(model: str, ranks: int) -> None:
    """Run a job for each way, and print what its ranks hold."""
    base = 0.0
    for way in WAYS:
        held, gradients = map(mean, zip(*horovod.run(rank, (model, way), num_proc=ranks), strict=True))
        base = base or held
        print(
            f"{way:18s} {held / 1e6:8.1f} MB, beyond: {(held - base) / 1e6:7.1f} MB ({(held - base) / gradients:.0%})"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp", int(sys.argv[2]) if len(sys.argv) > 2 else 2)
