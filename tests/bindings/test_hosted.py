"""Calls as a rank inside a process of another system."""

from __future__ import annotations

import sys

import pytest

from horovod.bindings.hosted import call_guarded
from horovod.errors import LaunchError


@pytest.mark.parametrize(("code", "said"), [(None, "0"), (0, "0"), (3, "3"), ("bye", "'bye'")])
def test_a_function_must_not_end_the_process(code: int | str | None, said: str) -> None:
    with pytest.raises(LaunchError, match=rf"^the function ended with sys.exit\({said}\) instead of returning"):
        call_guarded(sys.exit, (code,), {})
