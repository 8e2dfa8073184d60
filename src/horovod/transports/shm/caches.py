"""The sizes of this machine's caches decide where data is put and in which portions."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BLOCK_BYTES", "ROTATION_BYTES"]


def _own_cache_bytes() -> int:
    """Return the size of a core's own second-level cache, or a guess."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K").removesuffix("M")) * (1 << 20 if text.endswith("M") else 1 << 10)
    except (OSError, ValueError):
        return 1 << 20


_OWN = _own_cache_bytes()

#: Two inputs and a result of this size fit into a core's own cache.
BLOCK_BYTES = min(max(_OWN // 4, 64 << 10), 1 << 20)

#: Memory that another core has read is slow to write again while it is in that core's cache: filling 64 KiB took
#: 8 us, and 3 us once it had left the reader's cache. So data for other ranks rotates through this many bytes.
ROTATION_BYTES = min(max(2 * _OWN, 1 << 20), 4 << 20)
