"""The packages refuse to stand beside the real SDK."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run

from khorovod_ipu.guard import found_sdk

PACKAGES = sorted(p.name for p in (Path(__file__).parents[1] / "src").iterdir() if (p / "__init__.py").exists())


def sdk_in(folder: Path) -> Path:
    """Something that looks like the SDK's PopART."""
    (folder / "popart_core").mkdir(parents=True)
    (folder / "popart_core" / "__init__.py").write_text("")
    return folder


def test_no_sdk_is_found_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "popart").mkdir()  # a namespace, such as a folder of somebody's tests
    assert found_sdk([str(tmp_path), str(tmp_path / "missing")]) == ""
    assert found_sdk() == ""


def test_the_sdk_is_found_by_a_package_or_by_a_single_file(tmp_path: Path) -> None:
    assert found_sdk([str(sdk_in(tmp_path / "a"))]) == str(tmp_path / "a" / "popart_core" / "__init__.py")
    (tmp_path / "poptorch.py").write_text("")
    assert found_sdk([str(tmp_path)]) == str(tmp_path / "poptorch.py")


def test_another_copy_of_ours_is_none(tmp_path: Path) -> None:
    for package in ("popart", "khorovod_ipu"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    assert found_sdk([str(tmp_path)]) == str(tmp_path / "popart" / "__init__.py")
    (tmp_path / "khorovod_ipu" / "guard.py").touch()
    assert found_sdk([str(tmp_path)]) == ""


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "khorovod_ipu"])
def test_every_package_refuses_beside_the_sdk(package: str, tmp_path: Path) -> None:
    sdk = sdk_in(tmp_path / "sdk")
    code, output = run(["python", "-c", f"import {package}"], tmp_path, PYTHONPATH=str(sdk))
    assert code == 1
    assert output.splitlines()[-1].startswith("ImportError: khorovod-ipu imitates Graphcore's SDK in software")
    assert str(sdk) in output and "pip uninstall khorovod-ipu" in output
