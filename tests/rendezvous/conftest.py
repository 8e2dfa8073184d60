"""Names and patience for the tests of the rendezvous."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest
from meetings import LONG_S

_jobs = itertools.count()


@pytest.fixture
def job() -> str:
    return f"test-meeting-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits as long as it takes for those who are to hear what is wrong."""
    monkeypatch.setattr("horovod.rendezvous.rank_zero._LINGER_S", LONG_S)


@pytest.fixture
def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays what it is, however long the test takes."""
    monkeypatch.setattr("horovod.rendezvous.keys.time", SimpleNamespace(time=lambda: 7.0))
