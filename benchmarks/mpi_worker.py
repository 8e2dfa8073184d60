"""One rank of an MPI job that is measured. Rank 0 reads commands from its input and answers on its output.

Between commands no rank waits inside an MPI call: MPI spins there, which would disturb the other contenders. The other
ranks look for a command 200 times a second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.jobs import write_event
from horovod.bench.cases import Case, input_blocks, output_blocks

__all__ = ["Worker", "main"]

_LOOK_S = 0.005
Array = np.ndarray[Any, Any]


class Worker:
    """Runs one rank's part of each command."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._call: Callable[[], list[Array]] | None = None

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry ``command`` out on every rank; return rank 0's answer."""
        if command["do"] == "prepare":
            return {"right": self._prepare(Case(**command["case"]))}
        if command["do"] == "measure":
            return {"times": self._measure(int(command["calls"]))}
        self._call = None
        return {}

    def _prepare(self, case: Case) -> bool:
        """Allocate, run once, and return whether the result is right on every rank."""
        rank, size = self._comm.rank, self._comm.size
        inputs: list[Array] = [np.empty(case.count(size), dtype=case.dtype) for _ in range(case.batch)]
        for array in inputs:
            blocks = input_blocks(case.op, rank, size)
            array.reshape(len(blocks), -1)[:] = np.array(blocks, dtype=case.dtype)[:, None]
        self._call = self._bind(case, inputs)
        expected = np.array(output_blocks(case.op, rank, size), dtype=case.dtype)
        right = all(bool((out.reshape(len(expected), -1) == expected[:, None]).all()) for out in self._call())
        for array in inputs:
            array[:] = 0
        return bool(self._comm.allreduce(right, MPI.LAND))

    def _bind(self, case: Case, inputs: list[Array]) -> Callable[[], list[Array]]:
        comm, array, size = self._comm, inputs[0], self._comm.size

        def all_at_once() -> list[Array]:
            MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, each, MPI.SUM) for each in inputs])
            return inputs

        def allreduce() -> list[Array]:
            comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
            return inputs

        def broadcast() -> list[Array]:
            comm.Bcast(array, 0)
            return inputs

        in_place = {"async": all_at_once, "allreduce": allreduce, "broadcast": broadcast}
        if case.op in in_place:
            return in_place[case.op]
        count = {"allgather": array.size * size, "reducescatter": array.size // size}.get(case.op, array.size)
        output: Array = np.empty(count, dtype=array.dtype)
        function = {
            "allreduce-new": comm.Allreduce,
            "allgather": comm.Allgather,
            "alltoall": comm.Alltoall,
            "reducescatter": comm.Reduce_scatter_block,
        }[case.op]

        def out_of_place() -> list[Array]:
            function(array, output)
            return [output]

        return out_of_place

    def _measure(self, calls: int) -> list[float]:
        call, clock, times = self._call, time.perf_counter, np.empty(calls)
        assert call is not None, "prepare comes before measure"
        self._comm.Barrier()
        for i in range(calls):
            start = clock()
            call()
            times[i] = clock() - start
        total = np.empty_like(times)
        self._comm.Allreduce(times, total, MPI.SUM)
        return list((total / self._comm.size).tolist())


def _commands(comm: Any) -> Any:
    """Yield the commands that rank 0 reads, on every rank, until rank 0's input ends."""
    while True:
        if comm.rank == 0:
            line = sys.stdin.readline()
            for peer in range(1, comm.size):
                comm.send(line, peer)
        else:
            while not comm.iprobe(0):
                time.sleep(_LOOK_S)
            line = comm.recv(source=0)
        if not line.strip():
            return
        yield json.loads(line)


def main() -> int:
    """Serve the commands from the input until it ends."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        write_event({"size": comm.size, "library": MPI.Get_library_version()})
    worker = Worker(comm)
    for command in _commands(comm):
        answer = worker.do(command)
        if comm.rank == 0:
            write_event(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
