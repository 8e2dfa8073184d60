"""Fixtures for tests of real schedulers: ``make test-clusters`` installs what they need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm as slurms
from namespaces import Cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurms.Slurm]:
    """A real Slurm of three nodes, made once."""
    yield from _slurm(tmp_path_factory)


@pytest.fixture
def own_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurms.Slurm]:
    """Another one, for tests that break it."""
    yield from _slurm(tmp_path_factory)


def _slurm(folders: pytest.TempPathFactory) -> Iterator[slurms.Slurm]:
    if reason := slurms.why_not():
        if os.environ.get("HOROVOD_TEST_CLUSTERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    base = folders.mktemp("slurm")
    for folder in (base, *base.parents):
        if folder.owner() == "root" and folder.parent != folder and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(0o711)  # another user's jobs read the configuration
    (base / "hosts").mkdir()
    (base / "slurm").mkdir()
    with Cluster(Path(base / "hosts")) as cluster, slurms.Slurm(cluster, base / "slurm") as found:
        yield found
