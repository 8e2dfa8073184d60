"""Division of instances and replicas among hosts, and the table of ``--print-topology``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from poprun.flags import CommandLineError

__all__ = ["JobTopology", "divide", "expand_hosts", "instance_variables", "table"]

_TITLE = "poprun topology"
_LABELS = ("hosts", "ILDs", "instances", "replicas")
_LABEL_WIDTH = max(map(len, _LABELS)) + 2


@dataclass(frozen=True)
class JobTopology:
    """The division of a job.

    Attributes:
        hosts: names of the hosts.
        ilds: number of IPU-Link domains; only shown.
        instances: number of processes of all hosts together.
        replicas: number of replicas of all instances together.
    """

    hosts: tuple[str, ...]
    ilds: int
    instances: int
    replicas: int

    @property
    def replicas_each(self) -> int:
        """Number of replicas per instance."""
        return self.replicas // self.instances

    @property
    def instances_each(self) -> int:
        """Number of instances per host."""
        return self.instances // len(self.hosts)


def expand_hosts(text: str) -> list[str]:
    """Parse ``host0,host1`` and ``host[0-2,4]``; numbers keep their leading zeros.

    Args:
        text: value of ``--host``.

    Raises:
        ValueError: the text has another form, or names a host twice.
    """
    found = []
    for entry in re.split(r",(?![^\[]*\])", text):
        match = re.fullmatch(r"([^\[\]]*)(?:\[([\d,-]+)\]([^\[\]]*))?", entry.strip())
        if not match or not entry.strip():
            raise CommandLineError(
                f"--host {text}: expected names such as host0,host1 or host[0-2,4]; received {entry!r}"
            )
        before, ranges, after = match[1], match[2], match[3] or ""
        if ranges is None:
            found.append(before)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            last = last or first
            if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
                raise CommandLineError(f"--host {text}: {part!r} is not a range such as 0-2")
            if int(last) - int(first) >= 10_000:
                raise CommandLineError(f"--host {text}: {part!r} are more than 10000 hosts")
            width = len(first) if first.startswith("0") else 0
            found += [f"{before}{number:0{width}}{after}" for number in range(int(first), int(last) + 1)]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise CommandLineError(f"--host {text}: {', '.join(twice)} is named twice. Name each host once")
    return found


def divide(hosts: Sequence[str], replicas: int, instances: int | None, ilds: int | None) -> JobTopology:
    """Divide replicas among instances, and instances among hosts, evenly.

    Args:
        hosts: their names.
        replicas: number of replicas of all instances together.
        instances: number of processes; one on each host when None.
        ilds: number of IPU-Link domains; one for each host when None.

    Raises:
        ValueError: the numbers cannot be divided evenly.
    """
    if instances is None:
        instances = len(hosts)
    ilds = len(hosts) if ilds is None else ilds
    if replicas % instances:
        near = replicas // instances * instances
        raise CommandLineError(
            f"--num-replicas={replicas} cannot be divided evenly among --num-instances={instances}; take "
            f"{' or '.join(str(n) for n in (near, near + instances) if n)} replicas"
        )
    if instances % len(hosts):
        near = instances // len(hosts) * len(hosts)
        raise CommandLineError(
            f"--num-instances={instances} cannot be divided evenly among {len(hosts)} hosts; take "
            f"{' or '.join(str(n) for n in (near, near + len(hosts)) if n)} instances"
        )
    if replicas % ilds:
        raise CommandLineError(f"--num-replicas={replicas} cannot be divided evenly among --num-ilds={ilds}")
    return JobTopology(tuple(hosts), ilds, instances, replicas)


def instance_variables(topology: JobTopology, index: int, ipus_per_replica: int) -> dict[str, str]:
    """Return the environment variables of an instance."""
    values = {
        "NUM_TOTAL_REPLICAS": topology.replicas,
        "NUM_IPUS_PER_REPLICA": ipus_per_replica,
        "NUM_LOCAL_REPLICAS": topology.replicas_each,
        "UNIFORM_REPLICAS_PER_INSTANCE": 1,
        "REPLICA_INDEX_OFFSET": index * topology.replicas_each,
        "LOCAL_INSTANCE_INDEX": index % topology.instances_each,
    }
    return {f"POPDIST_{name}": str(value) for name, value in values.items()}


def table(topology: JobTopology) -> str:
    """Return the table of ``--print-topology``; each cell spans the cells below it."""
    rows: list[list[str]] = [list(topology.hosts)]
    rows += [list(map(str, range(n))) for n in (topology.ilds, topology.instances, topology.replicas)]
    inner = _inner_width(rows, topology.replicas)
    width = _LABEL_WIDTH + 1 + inner
    lines = [" " + "=" * width, f"|{_TITLE:^{width}}|", f"|{'=' * width}|"]
    for label, cells in zip(_LABELS, rows, strict=True):
        if label != _LABELS[0]:
            lines.append(f"|{'-' * _LABEL_WIDTH}|{'-' * inner}|")
        each = (inner + 1) // len(cells) - 1
        lines.append(f"|{f' {label}':<{_LABEL_WIDTH}}|" + "".join(f"{cell:^{each}}|" for cell in cells))
    return "\n".join([*lines, " " + "-" * width])


def _inner_width(rows: Sequence[Sequence[str]], replicas: int) -> int:
    """Return the width of a cell: each text fits, and cells of all rows are aligned."""
    widest = 3
    for cells in rows:
        below = replicas // len(cells)
        needed = max(map(len, cells)) + 2
        widest = max(widest, -(-(needed + 1) // below) - 1)
    return max((widest + 1) * replicas - 1, -(-(len(_TITLE) + 2 - _LABEL_WIDTH) // replicas) * replicas - 1)
