"""The source distribution has all that a wheel is built from."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1]


def test_what_is_forced_into_the_wheel_is_in_the_source_distribution() -> None:
    text = (FOLDER / "pyproject.toml").read_text()
    forced = re.findall(r'^"(.+)" = "\1"$', text.partition("force-include]")[2], re.MULTILINE)
    [included] = re.findall(r"sdist\]\ninclude = \[(.*)\]", text)
    assert forced == ["khorovod_ipu.pth"]
    assert all(f'"{name}"' in included and (FOLDER / name).exists() for name in forced)


def test_starting_python_imports_the_finder_and_nothing_else() -> None:
    """One line for ``site``, which is passed over with ``-S``."""
    assert (FOLDER / "khorovod_ipu.pth").read_text() == "import khorovod_ipu_finder\n"
