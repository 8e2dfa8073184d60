"""Imports go one way: bindings -> context -> {observe, links} -> engine -> core; launch -> rendezvous.

import-linter checks the contracts in ``pyproject.toml``; the tests here add what it cannot express.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from importlinter.cli import lint_imports
from sources import ROOT, modules

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "mpi4py")
#: Modules that load a framework, in packages that must not: others import them inside functions only.
LOADS_A_FRAMEWORK = (
    "horovod.transports.kernels_torch",
    "horovod.transports.nccl",
    "horovod.transports.on_device",
    "horovod.transports.torch_dist",
    "horovod.transports.mpi",
    "horovod.rendezvous.mpi",
    "horovod._keras.on_tensorflow",
    "horovod._keras.on_torch",
    "horovod._keras.on_jax",
)


def test_contracts_of_imports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # import-linter disables all loggers that exist, and later tests of this process need this one.
    monkeypatch.setattr(logging.getLogger("horovod"), "disabled", False)
    assert lint_imports(no_cache=True, no_logo=True) == 0, "see the contracts in pyproject.toml"


def test_modules_that_load_a_framework_are_imported_in_functions() -> None:
    eager = [
        f"{module.place}:{imported.line} imports {imported.target} at its top"
        for module in modules().values()
        for imported in module.imports()
        if imported.target in LOADS_A_FRAMEWORK
        and module.name not in LOADS_A_FRAMEWORK
        and module.name.split(".")[1] == imported.target.split(".")[1]
        and not imported.lazy
    ]
    assert not eager


def test_the_package_itself_loads_nothing() -> None:
    eager = [imported.target for imported in modules()["horovod"].imports() if not imported.lazy]
    assert [target for target in eager if target.startswith("horovod")] == ["horovod._version"]


def test_names_come_from_the_module_that_defines_them() -> None:
    assert not [m.place for m in modules().values() for i in m.imports() if i.target == "horovod"]


def circles() -> list[list[str]]:
    """Return groups of modules that import each other, imports inside functions included."""
    edges = {
        name: {i.target for i in module.imports() if i.target in modules() and i.target != name}
        for name, module in modules().items()
        if name != "horovod"
    }
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for following in edges.get(todo.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        reach[start] = seen
    found = {frozenset({n, *(o for o in reach[n] if n in reach.get(o, ()))}) for n in reach if n in reach[n]}
    return sorted(sorted(group) for group in found)


def test_no_circle_of_imports() -> None:
    assert not circles()


def test_the_architecture_names_every_package() -> None:
    text = Path(ROOT, "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = {name.split(".")[1] for name in modules() if name.count(".") == 1} - {"_version"}
    assert not {name for name in packages if f"`{name}`" not in text}
