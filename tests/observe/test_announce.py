"""The log lines about a job."""

from __future__ import annotations

import numpy as np
from harness import run_ranks
from heard import heard


def _said(level: str) -> list[str]:
    import horovod.numpy as hvd

    with heard(level, "%(levelname)s %(message)s") as found:
        hvd.init()
        hvd.allreduce(np.ones(256, np.float32), name="x")
        hvd.shutdown()
    return found


def test_info_says_who_takes_part_where_and_how() -> None:
    first, second = run_ranks(2, _said, "INFO", init=False, env={"HOROVOD_BUCKET_BYTES": str(2 << 20)})
    assert second == []
    [text] = first
    for word in ("2 ranks over shm: rank 0 (pid ", "; rank 1 (pid ", "khorovod ", "Python 3.", "numpy ",
                 "fusion up to 128 MiB, gradient buckets of 2 MiB"):  # fmt: skip
        assert word in text


def test_debug_says_it_of_every_rank() -> None:
    env = {"HOROVOD_CACHE_CAPACITY": "7"}
    for rank, texts in enumerate(run_ranks(2, _said, "DEBUG", init=False, env=env)):
        [start] = [text for text in texts if text.startswith(f"DEBUG rank {rank} (pid ")]
        assert "OMP_NUM_THREADS=1" in start and "HOROVOD_CACHE_CAPACITY=7" in start
