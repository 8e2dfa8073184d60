"""One rank of an mpi4py job that is measured: sleeps on a socket until told what to do.

It must not wait in an MPI call between measurements, for MPI spins, and that would disturb the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod.bench.cases import Case, input_blocks, output_blocks
from horovod.bench.mpi_find import TOKEN

__all__ = ["Worker", "main"]

Array = np.ndarray[Any, Any]


class Worker:
    """Runs one rank's part of each command."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._call: Callable[[], list[Array]] | None = None

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry ``command`` out and return the answer."""
        if command["do"] == "prepare":
            return self._prepare(Case(**command["case"]))
        if command["do"] == "measure":
            return self._measure(int(command["calls"]))
        self._call = None
        return {}

    def _prepare(self, case: Case) -> dict[str, Any]:
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
        return {"right": right}

    def _bind(self, case: Case, inputs: list[Array]) -> Callable[[], list[Array]]:
        comm, array, size = self._comm, inputs[0], self._comm.size
        if case.op == "async":

            def all_at_once() -> list[Array]:
                MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, each, MPI.SUM) for each in inputs])
                return inputs

            return all_at_once
        if case.op in ("allreduce", "broadcast"):

            def in_place() -> list[Array]:
                if case.op == "allreduce":
                    comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
                else:
                    comm.Bcast(array, 0)
                return inputs

            return in_place
        count = {"allgather": array.size * size, "reducescatter": array.size // size}.get(case.op, array.size)
        output: Array = np.empty(count, dtype=array.dtype)
        function = {
            "allreduce-new": comm.Allreduce,
            "allgather": comm.Allgather,
            "alltoall": comm.Alltoall,
            "reducescatter": comm.Reduce_scatter_block,
        }

        def out_of_place() -> list[Array]:
            function[case.op](array, output)
            return [output]

        return out_of_place

    def _measure(self, calls: int) -> dict[str, Any]:
        call = self._call
        if call is None:
            raise RuntimeError("measure before prepare")
        clock = time.perf_counter
        times = np.empty(calls)
        self._comm.Barrier()
        for i in range(calls):
            start = clock()
            call()
            times[i] = clock() - start
        total = np.empty_like(times)
        self._comm.Allreduce(times, total, MPI.SUM)
        return {"times": (total / self._comm.size).tolist()} if self._comm.rank == 0 else {}


def main(argv: list[str]) -> int:
    """Serve the commands that come over the socket named in ``argv``, a path or ``address:port``, until it closes."""
    comm = MPI.COMM_WORLD
    with _connect(argv[0]) as connection:
        connection.sendall(os.environ[TOKEN].encode())
        with connection.makefile("rwb") as stream:
            _say(stream, {"rank": comm.rank, "size": comm.size, "library": MPI.Get_library_version()})
            worker = Worker(comm)
            for line in stream:
                _say(stream, worker.do(json.loads(line)))
    return 0


def _connect(where: str) -> socket.socket:
    if where.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(where)
        return connection
    address, _, port = where.rpartition(":")
    return socket.create_connection((address, int(port)))


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
