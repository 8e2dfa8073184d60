"""MPICH or Open MPI through mpi4py, as a job of its own that rank 0 directs over a pipe."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.jobs import clean_environment, parse_event
from benchmarks.mpi_find import MpiInstall, find_mpi
from horovod.bench.cases import Case
from horovod.bench.control import Agreement, Contender, WrongResultError
from horovod.bench.gloo import common_interface

__all__ = ["Mpi", "MpiJob", "PeerFailedError", "Spread", "command_line"]

_START_S, _ANSWER_S = 60.0, 300.0
#: Settings of the ranks that hold for the peers, too.
_OURS = ("PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class PeerFailedError(RuntimeError):
    """A peer's job did not start, died, or did not answer; the benchmark goes on without it."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the ranks of a job on several hosts run.

    Attributes:
        hosts: name and number of ranks of each host, in the order of ranks.
        interface: the network interface that joins the hosts; of the same name on all of them.
    """

    hosts: tuple[tuple[str, int], ...]
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
        words, env = command_line(install, size, spread)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  close() closes it
        self._process = subprocess.Popen(
            [*words, sys.executable, "-m", "benchmarks.mpi_worker"],
            # Hydra forgets the last variable of an environment on its way to another host.
            env=clean_environment() | env | {"KHOROVOD_BENCH_LAST": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            hello = self._read(_START_S)
            if hello["size"] != size:
                raise PeerFailedError(f"expected a job of {size} ranks, got {hello['size']} ({hello['library'][:40]})")
        except BaseException:
            self.close()
            raise

    def ask(self, **command: Any) -> dict[str, Any]:
        """Have a command carried out by every rank; return rank 0's answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailedError(f"the job has ended ({error}): {self._tail()}") from error
        return self._read(_ANSWER_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; the job is ended if none comes in time."""
        assert self._process.stdout is not None
        said = []
        timer = threading.Timer(timeout_s, self._process.terminate)
        timer.start()
        try:
            for line in self._process.stdout:
                event = parse_event(line)
                if event is not None:
                    return event
                said.append(line.strip())
        finally:
            timer.cancel()
            timer.join()
        raise PeerFailedError(f"the job ended, or gave no answer within {timeout_s:.0f} s: {self._tail(said)}")

    def _tail(self, said: list[str] | None = None) -> str:
        self._log.seek(0)
        lines = [*(said or []), *self._log.read().decode(errors="replace").strip().splitlines()]
        return " / ".join(lines[-3:])[-300:] or "it printed nothing"

    def close(self) -> None:
        """End the job: the workers leave when their input ends; after 5 s they are killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for end in (self._process.stdin.close, self._process.terminate, self._process.kill):
            try:
                end()
                self._process.wait(5)
                break
            except (subprocess.TimeoutExpired, OSError):
                continue
        self._process.stdout.close()
        self._log.close()


def command_line(install: MpiInstall, size: int, spread: Spread | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the start of the command that runs ``size`` ranks, and the variables it needs.

    Args:
        install: which MPI; at the same path on all hosts.
        size: number of ranks.
        spread: where they run; None for this host alone.

    Returns:
        The command and its variables. Variables travel to other hosts by name.
    """
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and install.flavour == "openmpi" else []
    if spread is None:
        oversubscribe = ["--map-by", ":OVERSUBSCRIBE"] if install.flavour == "openmpi" else []
        return [*install.command, "-n", str(size), *oversubscribe, *root], install.env
    # PRRTE passes the library path on to daemons on other hosts only when it is called mpirun.
    program = str(Path(install.command[0]).with_name("mpirun"))
    env = {name: value for name, value in install.env.items() if not name.endswith("_PREFIX")}
    travel = [*env, *(name for name in os.environ if name.startswith(("UCX_", "FI_")) or name in _OURS)]
    hosts = ",".join(f"{name}:{slots}" for name, slots in spread.hosts)
    if install.flavour == "mpich":
        words = ["-n", str(size), "-hosts", hosts, "-bind-to", "none", "-iface", spread.interface]
        return [install.command[0], *words, "-genvlist", ",".join(travel)], env
    words = ["-n", str(size), "--host", hosts, "--bind-to", "none", "--map-by", "slot"]
    # Ranks that share cores must not spin.
    words += ["--mca", "mpi_yield_when_idle", "1", "--mca", "btl_tcp_if_include", spread.interface]
    return [program, *root, *words, *(word for name in travel for word in ("-x", name))], env


def _spread(control: Agreement, typed: str) -> Spread | None:
    """Return where the ranks run, by the names of ``-H`` if there are as many; None on one host. On all ranks."""
    names = control.gather(os.uname().nodename)
    counts = [(name, names.count(name)) for name in dict.fromkeys(names)]
    if len(counts) == 1:
        return None
    given = [part.partition(":")[0] for part in typed.split(",")]
    if len(given) == len(counts):
        counts = [(name, slots) for name, (_, slots) in zip(given, counts, strict=True)]
    return Spread(tuple(counts), common_interface(control)[0])


class Mpi(Contender):
    """A contender in processes of its own. Rank 0 directs it while the other ranks sleep.

    Args:
        flavour: ``mpich`` or ``openmpi``.
        control: how the ranks agree.
        prefix: where that MPI is installed; empty looks for it.
        hosts: the names of the hosts as typed after ``-H``.
    """

    def __init__(self, flavour: str, control: Agreement, prefix: str = "", hosts: str = "") -> None:
        self.name = flavour
        self._control = control
        self._job: MpiJob | None = None
        self._failed = ""
        spread = _spread(control, hosts)
        if control.rank != 0:
            return
        install, self._failed = find_mpi(flavour, prefix)
        if install is not None:
            try:
                self._job = MpiJob(install, control.size, spread)
            except PeerFailedError as error:
                self._failed = str(error)

    def why_not(self, case: Case) -> str:
        """Return why this MPI does not take part, or not in this case."""
        if self._failed:
            return self._failed
        return f"MPI has no type for {case.dtype}" if case.dtype in ("float16", "bfloat16") else ""

    def _ask(self, **command: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if self._job is not None and not self._failed:
            try:
                answer = self._job.ask(**command)
            except PeerFailedError as error:
                self._failed = str(error)
        self._control.barrier()
        return answer

    def prepare(self, case: Case) -> None:
        """Allocate, run once, and check, on every rank of the job."""
        if not self._ask(do="prepare", case=dataclasses.asdict(case)).get("right", True):
            raise WrongResultError(f"{self.name}: {case} gave a wrong result")

    def measure(self, calls: int) -> list[float]:
        """Time ``calls`` calls; empty when the job died, and on the other ranks."""
        return list(self._ask(do="measure", calls=calls).get("times", []))

    def release(self) -> None:
        self._ask(do="release")

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
