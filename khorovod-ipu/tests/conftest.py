"""The fixtures of the house, for the tests of ``khorovod-ipu``."""

from __future__ import annotations

from house import cluster, mpirun, no_leaks, pytest_collection_modifyitems

__all__ = ["cluster", "mpirun", "no_leaks", "pytest_collection_modifyitems"]
