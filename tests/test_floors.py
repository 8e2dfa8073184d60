"""The oldest torch that pyproject.toml allows has every name of torch that we use.

It cannot be installed here: the package index has older releases for CUDA only. The names were looked up in the stubs
of torch 2.1, and unsigned integers in the notes of 2.3. A new name must be looked up and added to
``tests/support/torch_floor.txt``. ``make floors`` runs the oldest TensorFlow, Keras and JAX.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import ROOT, Module, modules

KNOWN = set((ROOT / "tests" / "support" / "torch_floor.txt").read_text(encoding="utf-8").split())


def _chain(node: ast.expr) -> str:
    """Return ``torch.nn.Module`` for that expression; empty for any other one."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def used(module: Module) -> Iterator[str]:
    """Yield the dotted names of torch that a module uses."""
    has_torch = any(imported.target.split(".")[0] == "torch" for imported in module.imports())
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif has_torch and isinstance(node, ast.Attribute) and (name := _chain(node)).startswith("torch."):
            yield name


def test_names_of_torch_exist_in_the_oldest_supported_release() -> None:
    prefixes = {name.rsplit(".", n)[0] for name in KNOWN for n in range(1, name.count(".") + 1)}
    new = {f"{module.place}: {name}" for module in modules().values() for name in used(module)}
    new = {line for line in new if line.partition(": ")[2] not in KNOWN | prefixes}
    assert not new, "look them up in the documentation of torch 2.3, and add them to tests/support/torch_floor.txt"


def test_the_floor_of_torch_is_the_one_that_was_looked_up() -> None:
    assert 'torch = ["torch>=2.3"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
