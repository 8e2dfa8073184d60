"""Compare Horovod's public names with ours: writes the generated parts of docs/migrating.md.

usage: python scripts/migrating.py [--check]
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml

from horovod.config import RANK_VARIABLES, SETTINGS
from horovod.launch.flags import _parser

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migrating.md"
DATA: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "data" / "horovod-0.28.1.yaml").read_text(encoding="utf-8"))
SAME, DIFFERENT, MISSING = "same", "different", "missing"
# Signatures do not depend on Ray, which is too large for most environments.
_RAY = ("ray", "ray.exceptions", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")


def _parameters(thing: Any) -> list[str] | None:
    """Return the names of the parameters; None if they are taken as they come."""
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_POSITIONAL for p in found) else [p.name for p in found]


def _declared(module: str) -> list[str]:
    """Return ``__all__`` of a package; its requirements, such as Spark, may be missing here."""
    path = ROOT / "src" / module.replace(".", "/") / "__init__.py"
    found = re.search(r"^__all__ = (\[.*?\])", path.read_text(encoding="utf-8") if path.exists() else "", re.M | re.S)
    return ast.literal_eval(found[1]) if found else []


def compare(module: str, name: str, theirs: str | None) -> tuple[str, str]:
    """Return whether we have a name of theirs, and what differs."""
    note = DATA["notes"].get(f"{module}.{name}", "")
    try:
        ours = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError, NotImplementedError):
        return (DIFFERENT if note else SAME) if name in _declared(module) else MISSING, note
    parameters = _parameters(ours)
    if theirs is not None and parameters is not None:
        if lost := [word for word in theirs.split() if word not in parameters and "kwargs" not in parameters]:
            return DIFFERENT, note or f"without {', '.join(f'`{word}`' for word in lost)}"
        if [word for word in parameters if word in theirs.split()] != theirs.split() and "kwargs" not in parameters:
            return DIFFERENT, note or "parameters in another order"
    return (DIFFERENT if note else SAME), note


def symbols() -> Iterator[str]:
    """Yield the table of symbols: first what is different or missing, then the names that are the same."""
    for module, names in DATA["symbols"].items():
        found = {name: compare(module, name, theirs) for name, theirs in names.items()}
        yield f"### `{module}`"
        yield ""
        if changed := {name: (status, note) for name, (status, note) in found.items() if status != SAME}:
            yield "| Horovod | here | remark |"
            yield "|---|---|---|"
            yield from (f"| `{name}` | {status} | {note or '-'} |" for name, (status, note) in changed.items())
            yield ""
        if same := [f"`{name}`" for name in found if name not in changed]:
            yield f"Same: {', '.join(same)}."
            yield ""


def flags() -> Iterator[str]:
    """Yield the table of the flags of horovodrun."""
    _, known = _parser("")  # also flags that --help leaves out
    inert = {flag for setting in SETTINGS if not setting.in_effect for flag in (setting.flag, setting.flag_off) if flag}
    rows = [
        (flag, MISSING if flag not in known else "no effect" if flag in inert else SAME)
        for flag in DATA["flags"].split()
    ]
    yield from _listed("flag", rows)


def variables() -> Iterator[str]:
    """Yield the table of environment variables."""
    settings = {setting.env: setting for setting in SETTINGS}
    rows = []
    for name, default in DATA["variables"].items():
        if name in RANK_VARIABLES.values():
            rows.append((name, SAME))
        elif name not in settings:
            rows.append((name, MISSING))
        elif not settings[name].in_effect:
            rows.append((name, "no effect"))
        elif name in DATA["notes"]:
            rows.append((name, f"different: {DATA['notes'][name]}"))
        elif default is not None and str(default) != str(ours := settings[name].default) and float(default) != ours:
            rows.append((name, f"different: default {float(ours):g} instead of {default}"))
        else:
            rows.append((name, SAME))
    yield from _listed("variable", rows)


def _listed(what: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield f"| {what} | here |"
    yield "|---|---|"
    yield from (f"| `{name}` | {status} |" for name, status in rows if status != SAME)
    yield ""
    yield f"Same: {', '.join(f'`{name}`' for name, status in rows if status == SAME)}."
    yield ""


def main(is_check: bool) -> int:
    """Write the page, or return 1 if it is out of date."""
    warnings.simplefilter("ignore")
    if find_spec("ray") is None:
        sys.modules.update({name: MagicMock() for name in _RAY})
    text = old = PAGE.read_text(encoding="utf-8")
    for part in (symbols, flags, variables):
        marks = (f"<!-- generated: {part.__name__} -->", f"<!-- end: {part.__name__} -->")
        body = "\n".join(part())
        text = re.sub(f"{marks[0]}.*?{marks[1]}", lambda _, m=marks, b=body: f"{m[0]}\n\n{b}\n{m[1]}", text, flags=re.S)  # type: ignore[misc]
    if is_check:
        return int(text != old)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
