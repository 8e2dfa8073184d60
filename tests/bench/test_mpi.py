"""mpi4py jobs that wait for commands: real processes of each MPI that is installed."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_doubles import LocalAgreement

from benchmarks.jobs import clean_environment
from benchmarks.mpi import Mpi, MpiJob, PeerFailedError, Spread, _spread, command_line
from benchmarks.mpi_find import MpiInstall, find_mpi
from horovod.bench.cases import OPS, Case

ROOT = Path(__file__).resolve().parents[2]


def installed(flavour: str) -> MpiInstall:
    """The MPI of this environment, or the one that the tests install apart."""
    apart = ROOT / ".mpi" / flavour
    install, reason = find_mpi(flavour, str(apart) if apart.exists() else "")
    if install is None:
        pytest.skip(reason)
    return install


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
def test_a_job_of_two_ranks_measures_every_operation(flavour: str) -> None:
    job = MpiJob(installed(flavour), 2)
    try:
        for op in OPS:
            case = {"op": op, "nbytes": 256, "dtype": "float32", "batch": 3 if op == "async" else 1}
            assert job.ask(do="prepare", case=case) == {"right": True}
            assert len(job.ask(do="measure", calls=5)["times"]) == 5
            assert job.ask(do="release") == {}
    finally:
        job.close()


def test_a_job_that_does_not_start_says_what_it_printed() -> None:
    broken = MpiInstall("mpich", (sys.executable, "-c", "print('no such network'); raise SystemExit(3)"))
    with pytest.raises(PeerFailedError, match="no such network"):
        MpiJob(broken, 2)


def test_an_mpi_that_is_missing_is_a_reason_and_no_error(tmp_path: Path) -> None:
    mpi = Mpi("openmpi", LocalAgreement(), str(tmp_path))
    assert "libmpi.so.40" in mpi.why_not(Case("allreduce", 64)) or "mpi4py" in mpi.why_not(Case("allreduce", 64))
    assert mpi.measure(3) == []
    mpi.close()


def test_half_precision_is_not_for_mpi() -> None:
    mpi = Mpi("mpich", LocalAgreement(), "/nonexistent")
    mpi._failed = ""
    assert "bfloat16" in mpi.why_not(Case("allreduce", 64, "bfloat16"))


def test_jobs_do_not_inherit_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MPI4PY_RC_THREADS", "0")
    clean = clean_environment()
    assert "RANK" not in clean and "HOROVOD_RANK" not in clean and "PMI_RANK" not in clean
    assert clean["MPI4PY_RC_THREADS"] == "0"


SPREAD = Spread((("a", 2), ("b", 2)), "eth0")


def test_over_several_hosts_open_mpi_is_started_by_its_mpirun() -> None:
    install = MpiInstall(
        "openmpi", ("/mpi/bin/prterun", "--prtemca"), {"MPI4PY_MPIABI": "openmpi", "PRTE_PREFIX": "/mpi"}
    )
    command, env = command_line(install, 4, SPREAD)
    assert command[0] == "/mpi/bin/mpirun"
    line = " ".join(command)
    assert "-n 4 --host a:2,b:2" in line and "btl_tcp_if_include eth0" in line
    assert "-x MPI4PY_MPIABI" in line
    assert env == {"MPI4PY_MPIABI": "openmpi"}


def test_over_several_hosts_mpich_gets_variables_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    install = MpiInstall("mpich", ("/mpi/bin/mpiexec.hydra",), {"MPI4PY_MPIABI": "mpich"})
    command, _ = command_line(install, 4, SPREAD)
    assert command[:9] == [
        "/mpi/bin/mpiexec.hydra", "-n", "4", "-hosts", "a:2,b:2", "-bind-to", "none", "-iface", "eth0",
    ]  # fmt: skip
    assert {"MPI4PY_MPIABI", "UCX_TLS"} <= set(command[-1].split(","))


def test_the_mpi_of_a_checkout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (".mpi/mpich/bin/mpiexec.hydra", ".mpi/mpich/lib/libmpi.so.12"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    install, reason = find_mpi("mpich")
    assert install is not None, reason
    assert install.command[0] == str(tmp_path / ".mpi/mpich/bin/mpiexec.hydra")


class _TwoHosts(LocalAgreement):
    """Rank 0 of three ranks on two hosts, whose names nothing resolves."""

    def gather(self, value: Any) -> list[Any]:
        is_name = isinstance(value, str)
        return ["no-such-host-1", "no-such-host-1", "no-such-host-2"] if is_name else [value] * 3


def test_names_of_hosts_are_not_resolved() -> None:
    spread = _spread(_TwoHosts(3), "first:2,second:1")
    assert spread.hosts == (("first", 2), ("second", 1))
    assert spread.interface in [name for _, name in socket.if_nameindex()]
