"""Fallbacks where CPython's or torch's internals are not as expected."""

from __future__ import annotations

import traceback
import types

import pytest

from horovod.bindings import unsafe
from horovod.bindings.sites import Site


def _raises() -> None:
    raise KeyError("inside")


def _lines() -> list[str]:
    try:
        Site("train.py", 42, "step").stand_in()(_raises)
    except KeyError as error:
        return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    raise AssertionError


def test_a_call_looks_as_if_made_at_the_users_line() -> None:
    assert "train.py:42 step" in _lines()


def test_without_code_objects_that_can_be_changed_the_call_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise TypeError("no such constructor")

    monkeypatch.setattr(unsafe, "types", types.SimpleNamespace(FunctionType=refuse))
    lines = _lines()
    assert "train.py:42 step" not in lines
    assert lines[-1].endswith("_raises")


def test_without_dynamos_rules_torch_is_left_alone() -> None:
    pytest.importorskip("torch")
    from horovod.torch import unsafe as torch_unsafe

    torch_unsafe._tell(types.ModuleType("torch._dynamo.trace_rules"))  # has no ``add``
