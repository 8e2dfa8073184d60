"""Engines between hosts in trouble: a rank dies in the middle, one does not come, what is there does not fit."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from conformance import HOSTS
from conformance_jobs import pretend
from harness import Ranks, on_ranks
from later import later

from horovod import errors
from horovod.rendezvous.interfaces import leading_address

hvd = later("horovod.torch")

Found = tuple[str, str]


def _loses_the_last(hosts: tuple[tuple[int, ...], ...]) -> Found:
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
@pytest.mark.parametrize(
    ("hosts", "env"), [((), {"HOROVOD_CPU_OPERATIONS": "GLOO"}), (HOSTS["2+2"], {}), (HOSTS["1+1"], {})]
)
def test_a_rank_that_dies_in_the_middle_is_named(hosts: tuple[tuple[int, ...], ...], env: dict[str, str]) -> None:
    last = (sum(map(len, hosts)) or 4) - 1
    outcomes = Ranks(last + 1, _loses_the_last, (hosts,), env=env, init=False).outcomes()
    assert outcomes[last].exitcode == -signal.SIGKILL
    for outcome in outcomes[:last]:
        assert outcome.value is not None, outcome.text
        assert outcome.value[0] == str(last), outcome.value
        assert "was killed by SIGKILL" in outcome.value[1]


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_GLOO_IFACE": "nonesuch0"}, "HOROVOD_GLOO_IFACE=nonesuch0"),
        ({"HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_GPU_OPERATIONS": "NCCL"}, "NCCL needs a GPU"),
        ({"HOROVOD_CPU_OPERATIONS": "MPI", "HOROVOD_MPI_THREADS_DISABLE": "1"}, "HOROVOD_MPI_THREADS_DISABLE=1"),
    ],
)
@on_ranks(2, init=False, given=["env"])
def test_what_cannot_be_is_an_error_of_init(text: str) -> None:
    with pytest.raises(errors.InitError, match=text):
        hvd.init()


def test_the_address_of_a_host_is_the_one_that_leads_to_rank_0() -> None:
    assert leading_address("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert leading_address("tcp://[::1]:5555") == "::1"
    assert leading_address("ipc://@anything") == ""


@on_ranks(2, init=False, env={"HOROVOD_CPU_OPERATIONS": "GLOO"})
def test_a_rank_that_leaves_while_another_looks_for_its_store_is_named() -> None:
    from horovod.rendezvous import keys

    if os.environ["HOROVOD_RANK"] == "0":
        hvd.init()
        hvd.shutdown()
        return
    with pytest.MonkeyPatch.context() as patch, pytest.raises(errors.PeerLostError, match="rank 0"):
        patch.setattr(keys, "local_name", lambda *_: "ipc://@nobody-listens-here")
        hvd.init()
