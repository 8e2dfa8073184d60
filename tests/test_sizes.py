"""Modules stay small: 400 lines is the limit, 600 the hard stop, functions fit on a screen."""

from __future__ import annotations

import ast
from pathlib import Path

from sources import ROOT, all_modules

SOFT, HARD, FUNCTION = 400, 600, 60

# Files over the soft limit and the lines they may have. This table may only shrink.
ALLOWED: dict[str, int] = {}

FILES = sorted(
    str(p.relative_to(ROOT))
    for folder in ("src", "tests", "examples", "khorovod-ipu")
    for p in (ROOT / folder).rglob("*.py")
)


def test_files_are_small() -> None:
    lines = {place: len(Path(ROOT, place).read_text(encoding="utf-8").splitlines()) for place in FILES}
    limits = {place: min(ALLOWED.get(place, SOFT), HARD) for place in FILES}
    large = [
        f"{place} has {lines[place]} lines, {limits[place]} are allowed"
        for place in FILES
        if lines[place] > limits[place]
    ]
    assert not large, "split by reason to change"


def test_allow_list_has_no_dead_entry() -> None:
    lines = {place: len(Path(ROOT, place).read_text(encoding="utf-8").splitlines()) for place in ALLOWED}
    assert {p: n for p, n in lines.items() if n <= SOFT} == {}, "no longer needed: take them out of ALLOWED"


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{module.place}:{node.lineno} {node.name} has {lines} lines"
        for module in all_modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)) > FUNCTION
    ]
    assert not long


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return (first.end_lineno or 0) - first.lineno + 1
    return 0
