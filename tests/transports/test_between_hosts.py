"""Engines between hosts in trouble: a rank dies in the middle, one does not come, what is there does not fit."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from conformance import HOSTS, pretend
from harness import Ranks, run_ranks

from horovod import errors
from horovod.transports.torch_dist import TorchGroups, address_towards, listen

Found = tuple[str, str]


def _loses_the_last(hosts: tuple[tuple[int, ...], ...]) -> Found:
    import horovod.torch as hvd

    pretend(hosts, hvd.init)
    tensor, rank, size = torch.ones(2_000_000), hvd.rank(), hvd.size()
    hvd.allreduce(tensor)
    handles = [hvd.allreduce_async(tensor, name=f"step{i}") for i in range(20)]
    if rank == size - 1:
        hvd.synchronize(handles[1])
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allreduce(tensor, name="after")
    except errors.PeerLostError as error:
        return str(error.rank), str(error)
    return "", "no error"


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "env"), [((), {"HOROVOD_CPU_OPERATIONS": "GLOO"}), (HOSTS["2+2"], {})])
def test_a_rank_that_dies_in_the_middle_is_named(hosts: tuple[tuple[int, ...], ...], env: dict[str, str]) -> None:
    outcomes = Ranks(4, _loses_the_last, (hosts,), env=env, init=False).outcomes()
    assert outcomes[3].exitcode == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert outcome.value is not None, outcome.text
        assert outcome.value[0] == "3", outcome.value
        assert "was killed by SIGKILL" in outcome.value[1]


def _refused() -> str:
    import horovod.torch as hvd

    try:
        hvd.init()
    except errors.InitError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_GLOO_IFACE": "nonesuch0"}, "HOROVOD_GLOO_IFACE=nonesuch0"),
        ({"HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_GPU_OPERATIONS": "NCCL"}, "NCCL needs a GPU"),
        ({"HOROVOD_CPU_OPERATIONS": "MPI", "HOROVOD_MPI_THREADS_DISABLE": "1"}, "HOROVOD_MPI_THREADS_DISABLE=1"),
    ],
)
def test_what_cannot_be_is_an_error_of_init(env: dict[str, str], text: str) -> None:
    for said in run_ranks(2, _refused, env=env, init=False):
        assert text in said


class _Dictionary:
    """A store for threads of one process."""

    endpoint = "ipc://@nowhere"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 60)
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        raise NotImplementedError

    def check(self, key: str) -> bool:
        return key in self.values

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def wait(self, keys: Any, timeout_s: float | None = None) -> None:
        for key in keys:
            self.get(key, timeout_s)

    def close(self) -> None: ...


class _Patient:
    def check(self, rank: int, waited_s: float) -> None: ...


def test_data_on_a_device_takes_the_same_way_through_an_engine() -> None:
    """NCCL's path, with the memory of this host as the device, and Gloo as the engine."""
    store, found = _Dictionary(), {}

    def run(rank: int) -> None:
        device = torch.device("cpu")
        groups = TorchGroups("gloo", rank, store, _Patient(), 60.0, listen(), device)
        group = groups.group([0, 1])
        mine = np.arange(6, dtype=np.uint8) + 10 * rank
        parts, rows, root = np.zeros(6, np.uint8), np.zeros(4, np.uint8), mine.copy()
        counts = [2, 4] if rank == 0 else [4, 2]
        group.exchange(mine, counts, parts, counts).wait()
        group.gather(mine[:2], rows, [2, 2]).wait()
        uneven = np.zeros(3, np.uint8)
        group.gather(mine[: rank + 1], uneven, [1, 2]).wait()
        group.broadcast(root, 1).wait()
        found[rank] = parts.tolist(), rows.tolist(), uneven.tolist(), root.tolist()
        groups.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == ([0, 1, 10, 11, 12, 13], [0, 1, 10, 11], [0, 10, 11], [10, 11, 12, 13, 14, 15])
    assert found[1] == ([2, 3, 4, 5, 14, 15], [0, 1, 10, 11], [0, 10, 11], [10, 11, 12, 13, 14, 15])


def test_the_address_of_a_host_is_the_one_that_leads_to_rank_0() -> None:
    assert address_towards("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert address_towards("tcp://[::1]:5555") == "::1"
    assert address_towards("ipc://@anything") == "127.0.0.1"
