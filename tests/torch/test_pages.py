"""Large results ask for large pages, small ones for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from horovod.torch.adapter import TorchAdapter

needs_large_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no transparent large pages"
)


def _flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(word, 16) for word in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise LookupError(f"nothing is mapped at {address:#x}")


@needs_large_pages
@pytest.mark.parametrize("inference", [False, True])
def test_a_large_result_asks_for_large_pages(inference: bool) -> None:
    with torch.inference_mode(inference):
        result = TorchAdapter().empty((64 << 20,), "uint8", torch.empty(0))
    assert not result.is_inference()
    assert "hg" in _flags(result.data_ptr() + result.nbytes // 2)
    # Its ends are within pages that it shares with others.
    result.fill_(7)
    assert int(result.sum(dtype=torch.int64)) == 7 * (64 << 20)


@needs_large_pages
def test_a_small_result_is_left_alone() -> None:
    result = TorchAdapter().empty((64 << 10,), "uint8", torch.empty(0))
    assert "hg" not in _flags(result.data_ptr())


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr("horovod.torch.pages._madvise", lambda *call: asked.append(call) or -1)
    result = TorchAdapter().empty((8 << 20,), "uint8", torch.empty(0))
    ((start, length, _),) = asked
    assert start >= result.data_ptr()
    assert start + length <= result.data_ptr() + result.nbytes
    assert start % 4096 == length % 4096 == 0
