"""Environment, marks and the check for leaks of tests that are a driver of Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from leaks import Belongings, leaked_since

__all__ = ["MARKS", "no_leaks"]

# Tests import this module before Ray, which reads them.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"}

MARKS = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves logs open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """As in other tests, but Ray's driver keeps connections with actors that have ended."""
    before = Belongings.now()
    yield
    left = [each for each in leaked_since(before) if "socket:" not in each]
    assert not left, "left behind by this test: " + "; ".join(left)
