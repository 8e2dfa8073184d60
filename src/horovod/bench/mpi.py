"""MPICH or Open MPI through mpi4py, as a job of its own that rank 0 directs."""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import secrets
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
from horovod.bench.gloo import interface_of
from horovod.bench.mpi_find import TOKEN, TOKEN_BYTES, MpiInstall, clean_environment, find_mpi
from horovod.transports.torch_dist import address_towards

__all__ = ["Mpi", "MpiJob", "PeerFailedError", "Spread", "between_hosts", "knows"]

_START_S = 60.0
#: Settings of the ranks that hold for the peers, too.
_OURS = ("PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ANSWER_S = 300.0
_STEP_S, _HELLO_S = 0.2, 5.0


class PeerFailedError(RuntimeError):
    """A peer's job did not start, died, or did not answer; the benchmark goes on without it."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the ranks of a job run that has several hosts.

    Attributes:
        hosts: name and number of ranks of each, in the order of ranks.
        address: of the host of rank 0, at which the others reach it.
        interface: the network interface that has it; of the same name on all hosts.
    """

    hosts: tuple[tuple[str, int], ...]
    address: str
    interface: str


class MpiJob:
    """Processes of one MPI job that wait for commands.

    Args:
        install: which MPI.
        size: number of ranks.
        spread: where they run; None for this host alone.

    Raises:
        PeerFailedError: the job did not come up within 60 s.
    """

    def __init__(self, install: MpiInstall, size: int, spread: Spread | None = None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="horovod-bench-"))
        self._log = (self._directory / "log").open("a+b")
        self._streams: list[BinaryIO] = []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(install, size, spread)
        except BaseException:
            self.close()
            raise

    def _start(self, install: MpiInstall, size: int, spread: Spread | None) -> None:
        # Whoever knows the token is one of ours: a port of this host is open to everybody.
        token = secrets.token_hex(TOKEN_BYTES // 2)
        with self._listen(size, spread) as listener:
            where = listener.getsockname()
            path = where if spread is None else f"{where[0]}:{where[1]}"
            command, env = (install.command, install.env) if spread is None else between_hosts(install, size, spread)
            self._process = subprocess.Popen(
                [*command, *(_flags(install, size) if spread is None else ()), *_worker(path)],
                # Hydra forgets the last variable of an environment on its way to another host.
                env=clean_environment() | env | {TOKEN: token, "KHOROVOD_BENCH_LAST": ""},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = time.monotonic() + _START_S
            streams = dict(self._accept(listener, size, token.encode(), deadline) for _ in range(size))
        if sorted(streams) != list(range(size)):
            raise PeerFailedError(f"{install.flavour}: {size} ranks started as {len(streams)} separate jobs")
        self._streams = [streams[rank] for rank in range(size)]

    def _listen(self, size: int, spread: Spread | None) -> socket.socket:
        if spread is not None:
            return socket.create_server((spread.address, 0), backlog=size)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._directory / "socket"))
        listener.listen(size)
        return listener

    def _accept(self, listener: socket.socket, size: int, token: bytes, deadline: float) -> tuple[int, BinaryIO]:
        listener.settimeout(_STEP_S)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise PeerFailedError(f"the job did not start: {self._tail()}") from None
                continue
            with connection:
                connection.settimeout(_HELLO_S)
                if not knows(connection, token):
                    continue
                connection.settimeout(_ANSWER_S)
                stream: Any = connection.makefile("rwb")
            break
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


def knows(connection: socket.socket, token: bytes) -> bool:
    """Whether who has connected says the token first.

    Args:
        connection: with them.
        token: what they must say.
    """
    said = b""
    try:
        while len(said) < len(token) and (more := connection.recv(len(token) - len(said))):
            said += more
    except OSError:
        return False
    return hmac.compare_digest(said, token)


def _worker(path: str) -> list[str]:
    return [sys.executable, "-m", "horovod.bench.mpi_worker", path]


def _flags(install: MpiInstall, size: int) -> list[str]:
    flags = ["-n", str(size)]
    if install.flavour == "openmpi":
        flags += ["--map-by", ":OVERSUBSCRIBE"]
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return flags


def between_hosts(install: MpiInstall, size: int, spread: Spread) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ranks on several hosts over ssh, up to what each of them runs.

    Args:
        install: which MPI; at the same path on all hosts.
        size: number of ranks.
        spread: where they run.

    Returns:
        The command, and what it needs in the environment. Variables travel by name.
    """
    # Of prterun's daemons on other hosts only mpirun sees to the libraries.
    program = str(Path(install.command[0]).with_name("mpirun"))
    env = {name: value for name, value in install.env.items() if not name.endswith("_PREFIX")}
    travel = [*env, TOKEN, *(name for name in os.environ if name.startswith(("UCX_", "FI_")) or name in _OURS)]
    hosts = ",".join(f"{name}:{slots}" for name, slots in spread.hosts)
    if install.flavour == "mpich":
        words = ["-n", str(size), "-hosts", hosts, "-bind-to", "none", "-iface", spread.interface]
        return [install.command[0], *words, "-genvlist", ",".join(travel)], env
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words = ["-n", str(size), "--host", hosts, "--bind-to", "none", "--map-by", "slot"]
    # Ranks that share cores, as those of hosts that are parts of one, would take them from each other.
    words += ["--mca", "mpi_yield_when_idle", "1", "--mca", "btl_tcp_if_include", spread.interface]
    return [program, *root, *words, *(word for name in travel for word in ("-x", name))], env


def _spread(control: Control) -> Spread | None:
    """Return where the ranks run; None on one host. Called on all ranks."""
    names = control.gather(os.uname().nodename)
    hosts = tuple((name, names.count(name)) for name in dict.fromkeys(names))
    if len(hosts) == 1 or control.rank != 0:
        return None
    address = address_towards(f"tcp://{socket.gethostbyname(hosts[1][0])}:9")
    return Spread(hosts, address, interface_of(address))


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
        spread = _spread(control)
        if control.rank != 0:
            return
        install, self._failed = find_mpi(flavour, prefix)
        if install is not None:
            try:
                self._job = MpiJob(install, control.size, spread)
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
