"""Which names are those of this host."""

from __future__ import annotations

import os

import pytest

from horovod.launch.hosts import is_this_host


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.1.1", "::1", os.uname().nodename])
def test_names_of_this_host(name: str) -> None:
    assert is_this_host(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid", "a..b", ""])
def test_names_that_are_not_this_host(name: str) -> None:
    assert not is_this_host(name)
