"""Errors where tensors of a GPU cannot be moved where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horovod.core.requests import Kind, ReduceOp
from horovod.errors import InitError, RequestError
from horovod.transports import nccl
from horovod.transports.local import LocalTransport
from horovod.transports.on_device import DeviceTransport


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find = nccl._library
    find.cache_clear()
    yield
    find.cache_clear()


def test_a_second_gpu_of_a_rank_is_an_error_at_the_call() -> None:
    groups: Any = SimpleNamespace(name="nccl", close=lambda: None)
    transport = DeviceTransport(LocalTransport(), groups)
    assert transport.takes("cuda:1", Kind.ALLREDUCE, ReduceOp.SUM, ["float32"])
    with pytest.raises(RequestError, match=r"were on cuda:1 before, and this one is on cuda:0.*tensor\.to\('cuda:1'\)"):
        transport.takes("cuda:0", Kind.ALLGATHER, ReduceOp.SUM, ["float32"])
    assert not transport.takes("cpu", Kind.ALLREDUCE, ReduceOp.SUM, ["float32"])


@pytest.mark.parametrize(
    ("kind", "op", "dtype", "taken"),
    [
        (Kind.ALLREDUCE, ReduceOp.AVERAGE, "bfloat16", True),
        (Kind.REDUCESCATTER, ReduceOp.SUM, "bool", True),
        (Kind.ALLREDUCE, ReduceOp.SUM, "int16", False),
        (Kind.ALLREDUCE, ReduceOp.SUM, "complex64", False),
        (Kind.ALLREDUCE, ReduceOp.ADASUM, "float32", False),
        (Kind.ALLTOALL, ReduceOp.SUM, "complex64", True),
    ],
)
def test_what_nccl_has_no_arithmetic_for_goes_through_host_memory(
    kind: Kind, op: ReduceOp, dtype: str, taken: bool
) -> None:
    groups: Any = SimpleNamespace(name="nccl", close=lambda: None)
    assert DeviceTransport(LocalTransport(), groups).takes("cuda:0", kind, op, ["float32", dtype]) == taken


def test_without_nccl_it_is_said_what_to_install(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> ctypes.CDLL:
        raise OSError

    monkeypatch.setattr(nccl.ctypes, "CDLL", none)
    with pytest.raises(InitError, match="needs NCCL, which comes with torch for CUDA: pip install torch"):
        nccl.check_nccl()


def test_an_old_nccl_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(into: Any) -> int:
        into._obj.value = 21304
        return 0

    monkeypatch.setattr(nccl, "_library", lambda: SimpleNamespace(ncclGetVersion=version))
    with pytest.raises(InitError, match=r"needs NCCL 2\.14 or newer; this one says 21304"):
        nccl.check_nccl()
