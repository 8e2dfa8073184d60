"""Resources that no process keeps after a test: children, threads, sockets, anonymous memory, our names in /dev/shm."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Belongings", "leaked_since"]

# One per process, started on first use and ended at exit by multiprocessing itself.
_HELPERS_OF_MULTIPROCESSING = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
_WATCHED_FILES = ("socket:", "/memfd:", "anon_inode:[pidfd]", "anon_inode:[eventpoll]")


@dataclass(frozen=True)
class Belongings:
    """The resources of this process at one moment.

    Attributes:
        children: process id and command line of each child, zombies included.
        threads: the living Python threads.
        files: descriptor and target of each open socket, memfd, pidfd and epoll.
        shared: names under /dev/shm that carry the project's name.
    """

    children: frozenset[str]
    threads: frozenset[threading.Thread]
    files: frozenset[str]
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        """Look around."""
        return cls(_children(), frozenset(threading.enumerate()), _files(), _shared())


def leaked_since(before: Belongings, grace_s: float = 60.0) -> list[str]:
    """Tell what is there now and was not ``before``.

    Args:
        before: an earlier look.
        grace_s: how long a thread that is ending may take, in seconds.

    Returns:
        One sentence for each thing; empty when all is well.
    """
    for thread in set(threading.enumerate()) - before.threads - {threading.current_thread()}:
        thread.join(grace_s)
    after = Belongings.now()
    if after.files - before.files:
        gc.collect()
        after = Belongings.now()
    return [
        *(f"child process {c}" for c in sorted(after.children - before.children)),
        *(f"thread {t.name!r}" for t in after.threads - before.threads),
        *(f"open file {f}" for f in sorted(after.files - before.files)),
        *(f"/dev/shm/{s}" for s in sorted(after.shared - before.shared)),
    ]


def _children() -> frozenset[str]:
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in (_read(path) or b"").decode().split():
            command = _read(Path(f"/proc/{pid}/cmdline"))
            if command is not None and not any(helper in command for helper in _HELPERS_OF_MULTIPROCESSING):
                found.add(f"{pid}: {command.replace(bytes(1), b' ').decode(errors='replace').strip() or '(zombie)'}")
    return frozenset(found)


def _read(path: Path) -> bytes | None:
    """Return the text of a file of /proc; None when its thread or process has ended since it was listed."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _files() -> frozenset[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(_WATCHED_FILES):
            found.add(f"{entry.name} -> {target}")
    return frozenset(found)


def _shared() -> frozenset[str]:
    root = Path("/dev/shm")
    return frozenset(p.name for p in root.iterdir() if "horovod" in p.name) if root.is_dir() else frozenset()
