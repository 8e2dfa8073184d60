"""Whether parameters are compared: by every rank of a job or by none, whatever its process has done before."""

from __future__ import annotations

import numpy as np
from harness import run_ranks


def _warnings_after_an_earlier_join() -> list[str]:
    import horovod.numpy as hvd
    from horovod.bindings.fingerprints import compare_once

    hvd.join()
    hvd.shutdown()
    hvd.init()
    found: list[str] = []
    mine = np.full(3, hvd.rank(), np.float32)
    for _ in range(2):
        compare_once(
            "step", ["w"], lambda: [mine], "broadcast()", hvd.global_process_set,
            lambda text, *words: found.append(text % words),
        )  # fmt: skip
    return found


def test_a_join_in_an_earlier_job_does_not_count() -> None:
    first, second = run_ranks(2, _warnings_after_an_earlier_join)
    assert len(first) == 1
    assert "different models: w began this step with other values on rank 1" in first[0]
    assert second == []
