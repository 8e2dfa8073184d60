"""Arenas fit into what a process may map; and what the system refuses is an error that names the remedy."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import on_ranks

from horovod.errors import InitError
from horovod.transports.shm.capacity import LEAST_BYTES, arena_bytes, share_of
from horovod.transports.shm.mapping import create_memfd, map_shared

GIB = 1 << 30


@pytest.mark.parametrize(
    ("ranks", "physical", "limit", "expected"),
    [
        (4, 64 * GIB, resource.RLIM_INFINITY, 64 * GIB),
        # 128 ranks on a machine of 2 TiB would map 256 TiB.
        (128, 2048 * GIB, resource.RLIM_INFINITY, (1 << 45) // 128),
        (2, 64 * GIB, 9 * GIB, 2 * GIB),
    ],
)
def test_the_arenas_of_all_ranks_fit(ranks: int, physical: int, limit: int, expected: int) -> None:
    assert share_of(ranks, physical, limit, mapped=GIB) == expected


def test_too_little_is_refused_with_the_number_that_is_needed() -> None:
    assert arena_bytes(LEAST_BYTES, 2) == LEAST_BYTES
    with pytest.raises(
        InitError, match=f"HOROVOD_ARENA_BYTES={LEAST_BYTES - 1} is too small: {LEAST_BYTES} bytes are needed"
    ):
        arena_bytes(LEAST_BYTES - 1, 2)


@contextlib.contextmanager
def _limited(which: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_what_the_system_refuses_names_the_remedy() -> None:
    fd = create_memfd("horovod-test", 64 * GIB)
    try:
        with _limited(resource.RLIMIT_NOFILE, 3), pytest.raises(InitError, match="ulimit -n"):
            create_memfd("horovod-test", 4096)
        with (
            _limited(resource.RLIMIT_FSIZE, 1 << 20),
            pytest.raises(InitError, match=r"ulimit -f.*HOROVOD_ARENA_BYTES"),
        ):
            create_memfd("horovod-test", 2 << 20)
        with _limited(resource.RLIMIT_AS, _mapped() + GIB), pytest.raises(InitError, match=r"ulimit -v.*ARENA_BYTES"):
            map_shared(fd, 64 * GIB)
        with (
            _limited(resource.RLIMIT_AS, _mapped() + (1 << 20)),
            pytest.raises(InitError, match=r"leaves [0-9]+ bytes"),
        ):
            arena_bytes(0, 2)
    finally:
        os.close(fd)
    for too_large in (1 << 63, 1 << 70):
        with pytest.raises(InitError, match="HOROVOD_ARENA_BYTES"):
            create_memfd("horovod-test", too_large)


@on_ranks(2, init=False)
def test_a_job_under_ulimit_v_has_smaller_arenas(room: int = 400 << 20) -> None:
    import horovod.numpy as hvd
    from horovod import context

    with _limited(resource.RLIMIT_AS, _mapped() + room):
        hvd.init()
        tensor = hvd.zeros(1000)
        tensor += 1
        with pytest.raises(MemoryError, match="HOROVOD_ARENA_BYTES"):
            hvd.zeros(room)
        assert LEAST_BYTES < context.engine().transport.arena.nbytes <= room // 2
        assert hvd.allreduce_(tensor, op=hvd.Sum).sum() == 2000


@on_ranks(3, init=False, hosts=(2, 1))
def test_ranks_on_several_hosts_are_told_of_ulimit_n(left: int = 14) -> None:
    """libzmq would abort the process of a rank."""
    import horovod.numpy as hvd

    opened = len([*Path("/proc/self/fd").iterdir()])
    with _limited(resource.RLIMIT_NOFILE, opened + left), pytest.raises(InitError) as refusal:
        hvd.init()
    text = str(refusal.value)
    assert "may not open more than" in text and "ulimit -n" in text


def test_the_size_is_found_without_a_descriptor() -> None:
    """The maker of the arena reports a lack of memory, with the limit; here nothing may fail."""
    script = """
import os, resource
from horovod.transports.shm.capacity import LEAST_BYTES, arena_bytes
os.open("/dev/null", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
assert arena_bytes(0, 4) >= LEAST_BYTES
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
