"""Binds an instance to a NUMA node, then becomes its program: ``python -m poprun.bind PROGRAM [ARGUMENTS]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["main", "node_of", "numa_nodes", "parse_cpus"]

_NODES = Path("/sys/devices/system/node")


def parse_cpus(text: str) -> set[int]:
    """Read a list of the kernel such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_nodes(usable: Iterable[int], folder: Path = _NODES) -> list[set[int]]:
    """The cores of each NUMA node, of those that this process may use; nodes without any are left out.

    Args:
        usable: cores that this process may use.
        folder: where the kernel tells.
    """
    allowed, found = set(usable), []
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        cpus = parse_cpus((node / "cpulist").read_text()) & allowed
        if cpus:
            found.append(cpus)
    return found


def node_of(local_instance: int, nodes: Sequence[set[int]]) -> set[int]:
    """The cores for an instance; none when there is nothing to choose."""
    return nodes[local_instance % len(nodes)] if len(nodes) > 1 else set()


def main() -> int:
    """Bind, then run the program in the place of this one."""
    command = sys.argv[1:]
    cpus = node_of(int(os.environ.get("POPDIST_LOCAL_INSTANCE_INDEX", "0")), numa_nodes(os.sched_getaffinity(0)))
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"poprun: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main())
