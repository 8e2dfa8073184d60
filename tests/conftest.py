"""The fixtures of the house, for the tests of ``horovod``."""

from __future__ import annotations

from elastic_double import job
from house import cluster, mpirun, no_leaks, pytest_collection_modifyitems

__all__ = ["cluster", "job", "mpirun", "no_leaks", "pytest_collection_modifyitems"]
