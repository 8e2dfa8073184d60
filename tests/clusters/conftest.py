"""Fixtures for tests of real schedulers: ``make test-clusters`` installs what they need."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm as slurms
from namespaces import Cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurms.Slurm]:
    """A real Slurm of three nodes, made once."""
    yield from _slurm()


@pytest.fixture
def own_slurm() -> Iterator[slurms.Slurm]:
    """Another one, for tests that break it."""
    yield from _slurm()


def _slurm() -> Iterator[slurms.Slurm]:
    if reason := slurms.why_not():
        if os.environ.get("HOROVOD_TEST_CLUSTERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    # Other users read the configuration, and pytest closes its own folders to them whenever it starts.
    with tempfile.TemporaryDirectory(prefix="horovod-slurm-") as name:
        base = Path(name)
        base.chmod(0o711)
        (base / "hosts").mkdir()
        (base / "slurm").mkdir()
        with Cluster(base / "hosts") as cluster, slurms.Slurm(cluster, base / "slurm") as found:
            yield found
