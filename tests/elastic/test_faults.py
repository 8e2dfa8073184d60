"""A rank is lost in every collective, in every way, at every moment; then the others do the same at the new size."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Ranks
from kernel import tells_how_processes_end
from numpy.typing import NDArray

from horovod.errors import PeerLostError

Array = NDArray[np.float64]
#: Elements of a tensor: any of 2 to 5 ranks has the same number of them.
_SMALL, _LARGE = 60, 240_000


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit() -> None:
    os._exit(3)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


#: How ranks end, one after the other, and what the others are told. A stopped rank is fenced by rank 0.
_WAYS: tuple[tuple[Callable[[], None], str], ...] = (
    (_kill, "was killed by SIGKILL"),
    (_exit, "exited with code 3"),
    (_stop, "was killed by SIGKILL"),
)
#: Which ranks end, by the number of those left: on one host first any, then rank 0, then the last; on two hosts first
#: one of the second, then rank 0, which leads, then all that is left of the second.
_VICTIMS, _VICTIMS_OF_HOSTS = {5: 1, 4: 0, 3: 2}, {5: 4, 4: 0, 3: 2}
_HOSTS = (3, 2)


def _data(rank: int, count: int) -> Array:
    return (np.arange(count) * (rank + 1) + rank) % 1009 / 8


def _allreduce(hvd: Any, rank: int, size: int, count: int) -> tuple[Array, Array]:
    return hvd.allreduce(_data(rank, count), op=hvd.Sum, name="x"), sum(_data(r, count) for r in range(size))


def _grouped(hvd: Any, rank: int, size: int, count: int) -> tuple[Array, Array]:
    first, second = hvd.grouped_allreduce([_data(rank, count), _data(rank + 1, count)], op=hvd.Max, name="x")
    expected = [np.max([_data(r + more, count) for r in range(size)], axis=0) for more in (0, 1)]
    return np.concatenate([first, second]), np.concatenate(expected)


def _allgather(hvd: Any, rank: int, size: int, count: int) -> tuple[Array, Array]:
    mine = _data(rank, count + rank)
    return hvd.allgather(mine, name="x"), np.concatenate([_data(r, count + r) for r in range(size)])


def _broadcast(hvd: Any, rank: int, size: int, count: int) -> tuple[Array, Array]:
    return hvd.broadcast(_data(rank, count), size - 1, name="x"), _data(size - 1, count)


def _alltoall(hvd: Any, rank: int, size: int, count: int) -> tuple[Array, Array]:
    part = slice(rank * count // size, (rank + 1) * count // size)
    return hvd.alltoall(_data(rank, count), name="x"), np.concatenate([_data(r, count)[part] for r in range(size)])


def _reducescatter(hvd: Any, rank: int, size: int, count: int) -> tuple[Array, Array]:
    part = slice(rank * count // size, (rank + 1) * count // size)
    return hvd.reducescatter(_data(rank, count), op=hvd.Sum, name="x"), sum(_data(r, count) for r in range(size))[part]


_COLLECTIVES: dict[str, Callable[[Any, int, int, int], tuple[Array, Array]]] = {
    "allreduce": _allreduce,
    "grouped": _grouped,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}


def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.001)


def _die_at(moment: str, die: Callable[[], None], folder: Path, size: int) -> None:
    """See that this rank, the victim, ends at a moment of its next collective."""
    from horovod.transports.shm.control import Control
    from horovod.transports.torch_dist import _TorchGroup

    if moment == "before":
        die()
    elif moment == "waiting":
        _until(lambda: len(list(folder.iterdir())) == size - 1)
        die()
    else:
        _die_in(Control, "post", 2 if moment == "middle" else 12, die)
        if moment == "between":
            _die_in(_TorchGroup, "_begun", 1, die)


def _die_in(owner: type, name: str, countdown: int, die: Callable[[], None]) -> None:
    original, calls = getattr(owner, name), itertools.count(1)

    def dying(*args: Any) -> Any:
        if next(calls) == countdown:
            die()
        return original(*args)

    setattr(owner, name, dying)


def _note_waiting(folder: Path, rank: int) -> None:
    """Let the victim know that this rank waits."""
    from horovod import context

    engine = context.engine()
    _until(lambda: bool(engine.waits()))
    (folder / str(rank)).touch()


def _fence(pid: int) -> None:
    """End a process as soon as it is stopped."""
    _until(lambda: Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"TtZX")
    os.kill(pid, signal.SIGKILL)


def _renumber(lost: int, rank: int, counts: list[int]) -> None:
    """Give this process its place among those that are left; ``counts`` are the ranks of each host, also afterwards."""
    hosts = [host for host, count in enumerate(counts) for _ in range(count)]
    counts[hosts[lost]] -= 1
    local = rank - hosts.index(hosts[rank]) - (hosts[lost] == hosts[rank] and lost < rank)
    higher = [host for host, count in enumerate(counts) if count > local]
    places = {
        "RANK": rank - (lost < rank), "SIZE": sum(counts), "LOCAL_RANK": local, "LOCAL_SIZE": counts[hosts[rank]],
        "CROSS_RANK": higher.index(hosts[rank]), "CROSS_SIZE": len(higher),
    }  # fmt: skip
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in places.items()})
    counts[:] = [count for count in counts if count]
    os.environ["HOROVOD_JOB_ID"] += "+"


def _losses(collective: str, moment: str, folder: Path, counts: list[int]) -> Iterator[tuple[int, str]]:
    """Lose one rank after the other; return how each loss was reported."""
    import horovod.numpy as hvd
    from horovod.bindings import process_sets

    run, count = _COLLECTIVES[collective], _SMALL if moment in ("before", "waiting") else _LARGE
    victims = _VICTIMS_OF_HOSTS if len(counts) > 1 else _VICTIMS
    for die, words in _WAYS:
        rank, size = hvd.rank(), hvd.size()
        victim, signs = victims[size], folder / str(size)
        found, expected = run(hvd, rank, size, count)
        np.testing.assert_array_equal(found, expected)
        pids = hvd.allgather_object(os.getpid())
        signs.mkdir(exist_ok=True)
        hvd.barrier()
        if rank == victim:
            _die_at("before" if moment == "between" and len(counts) == 1 else moment, die, signs, size)
        elif moment == "waiting":
            threading.Thread(target=_note_waiting, args=(signs, rank)).start()
        if die is _stop and rank == (1 if victim == 0 else 0):
            threading.Thread(target=_fence, args=(pids[victim],)).start()
        with pytest.raises(PeerLostError, match=rf"^rank {victim} \(pid {pids[victim]} on .*") as caught:
            while True:  # some need nothing of the victim, and notice its loss in the next operation
                np.testing.assert_array_equal(*run(hvd, rank, size, count))
        assert caught.value.rank == victim
        said = str(caught.value)
        assert words in said or "its connection ended" in said or not tells_how_processes_end(), said
        yield victim, said
        process_sets.shutdown()
        _renumber(victim, rank, counts)
        process_sets.init()
    found, expected = run(hvd, hvd.rank(), hvd.size(), count)
    np.testing.assert_array_equal(found, expected)


def _survive(*args: Any) -> list[tuple[int, str]]:
    return list(_losses(*args))


@pytest.mark.parametrize("moment", ["before", "waiting", "middle", "between"])
@pytest.mark.parametrize("collective", _COLLECTIVES)
def test_ranks_are_lost_one_after_the_other(collective: str, moment: str, tmp_path: Path) -> None:
    counts = list(_HOSTS) if moment == "between" else [5]
    hosts = _HOSTS if moment == "between" else ()
    outcomes = Ranks(5, _survive, (collective, moment, tmp_path, counts), hosts=hosts).outcomes()
    survivors = [outcome for outcome in outcomes if outcome.exitcode == 0]
    assert len(survivors) == 2, [outcome.text for outcome in outcomes]
    victims = _VICTIMS_OF_HOSTS if hosts else _VICTIMS
    for outcome in survivors:
        assert [victim for victim, _ in outcome.value] == [victims[size] for size in (5, 4, 3)]
    ended = sorted(outcome.exitcode for outcome in outcomes if outcome.exitcode)
    assert ended == [-signal.SIGKILL, -signal.SIGKILL, 3]
