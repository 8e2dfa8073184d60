"""MPICH or Open MPI through mpi4py, as a job of its own that rank 0 directs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from horovod.bench.cases import Case
from horovod.bench.control import Control, WrongResultError
from horovod.bench.mpi_find import MpiInstall, clean_environment, find_mpi

__all__ = ["Mpi", "MpiJob", "PeerFailedError"]

_START_S = 60.0
_ANSWER_S = 300.0
_STEP_S = 0.2


class PeerFailedError(RuntimeError):
    """A peer's job did not start, died, or did not answer; the benchmark goes on without it."""


class MpiJob:
    """Processes of one MPI job that wait for commands.

    Args:
        install: which MPI.
        size: number of ranks.

    Raises:
        PeerFailedError: the job did not come up within 60 s.
    """

    def __init__(self, install: MpiInstall, size: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="horovod-bench-"))
        self._log = (self._directory / "log").open("a+b")
        self._streams: list[BinaryIO] = []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(install, size)
        except BaseException:
            self.close()
            raise

    def _start(self, install: MpiInstall, size: int) -> None:
        path = str(self._directory / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(size)
            self._process = subprocess.Popen(
                [*install.command, *_flags(install, size), sys.executable, "-m", "horovod.bench.mpi_worker", path],
                env=clean_environment() | install.env,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            streams = dict(self._accept(listener, size) for _ in range(size))
        if sorted(streams) != list(range(size)):
            raise PeerFailedError(f"{install.flavour}: {size} ranks started as {len(streams)} separate jobs")
        self._streams = [streams[rank] for rank in range(size)]

    def _accept(self, listener: socket.socket, size: int) -> tuple[int, BinaryIO]:
        deadline = time.monotonic() + _START_S
        listener.settimeout(_STEP_S)
        while True:
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise PeerFailedError(f"the job did not start: {self._tail()}") from None
        with connection:
            connection.settimeout(_ANSWER_S)
            stream: Any = connection.makefile("rwb")
        hello = self._read(stream)
        if hello["size"] != size:
            raise PeerFailedError(f"the job has {hello['size']} ranks, {size} were asked for ({hello['library'][:40]})")
        return int(hello["rank"]), stream

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``command`` to every rank and wait for the answers, in rank order."""
        line = json.dumps(command).encode() + b"\n"
        try:
            for stream in self._streams:
                stream.write(line)
                stream.flush()
        except OSError as error:
            raise PeerFailedError(f"the job is gone ({error}): {self._tail()}") from error
        return [self._read(stream) for stream in self._streams]

    def _read(self, stream: BinaryIO) -> dict[str, Any]:
        try:
            line = stream.readline()
        except OSError as error:
            raise PeerFailedError(f"no answer within {_ANSWER_S:.0f} s: {self._tail()}") from error
        if not line.endswith(b"\n"):
            raise PeerFailedError(f"the job ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-300:] or "it said nothing"

    def close(self) -> None:
        """End the job: the workers leave when their socket closes, and what is left is ended after 5 s."""
        for stream in self._streams:
            stream.close()
        self._streams = []
        if self._process is not None:
            _reap(self._process)
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for ``process``; ask it to end, then make it."""
    for end in (process.terminate, process.kill):
        try:
            process.wait(5)
            return
        except subprocess.TimeoutExpired:
            end()
    process.wait()


def _flags(install: MpiInstall, size: int) -> list[str]:
    flags = ["-n", str(size)]
    if install.flavour == "openmpi":
        flags += ["--map-by", ":OVERSUBSCRIBE"]
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return flags


class Mpi:
    """A contender in processes of its own. Rank 0 directs it while the other ranks sleep.

    Args:
        flavour: ``mpich`` or ``openmpi``.
        control: how the ranks agree.
        prefix: where that MPI is installed; empty looks for it.
    """

    def __init__(self, flavour: str, control: Control, prefix: str = "") -> None:
        self.name = flavour
        self._control = control
        self._job: MpiJob | None = None
        self._failed = ""
        if len(set(control.gather(os.uname().nodename))) > 1:
            self._failed = "MPI is measured on one host only; across hosts, name gloo"
            return
        if control.rank != 0:
            return
        install, self._failed = find_mpi(flavour, prefix)
        if install is not None:
            try:
                self._job = MpiJob(install, control.size)
            except PeerFailedError as error:
                self._failed = str(error)

    def why_not(self, case: Case) -> str:
        """Why this MPI does not take part, or not in this case."""
        if self._failed:
            return self._failed
        return f"MPI has no type for {case.dtype}" if case.dtype in ("float16", "bfloat16") else ""

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        if self._job is not None and not self._failed:
            try:
                answers = self._job.ask(command)
            except PeerFailedError as error:
                self._failed = str(error)
        self._control.barrier()
        return answers

    def prepare(self, case: Case) -> None:
        """Allocate, run once, and check, on every rank of the job."""
        answers = self._ask({"do": "prepare", "case": dataclasses.asdict(case)})
        wrong = [rank for rank, answer in enumerate(answers) if not answer["right"]]
        if wrong:
            raise WrongResultError(f"{self.name}: {case} is wrong on ranks {wrong}")

    def measure(self, calls: int) -> list[float]:
        """Time ``calls`` calls; empty when the job died, and on the other ranks."""
        answers = self._ask({"do": "measure", "calls": calls})
        return list(answers[0]["times"]) if answers else []

    def release(self) -> None:
        """Drop the arrays of the case."""
        self._ask({"do": "release"})

    def close(self) -> None:
        """End the job."""
        if self._job is not None:
            self._job.close()
