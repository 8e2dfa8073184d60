"""Imports go one way only: bindings -> context -> {observe, links} -> engine -> core; launch -> rendezvous."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sources import Import, Module, modules

# Everything may import these; they import nothing but what stands before them.
GROUND = (
    "horovod._version",
    "horovod.errors",
    "horovod.spelling",
    "horovod.phrases",
    "horovod.splits",
    "horovod.files",
    "horovod.cgroups",
    "horovod.processors",
    "horovod.config",
    "horovod.config_page",
    "horovod.launchers",
    "horovod.world",
    "horovod.logs",
    "horovod.tracebacks",
)
SHARED_WORDS = "horovod.core.requests"

# room -> rooms, or single modules, that it may import besides itself and the ground.
MAY_IMPORT = {
    "core": (),
    "transports": ("core.adasum",),
    "rendezvous": (),
    "timeline": ("core",),
    "engine": ("core", "transports.base", "transports.kernels"),
    "observe": ("core", "engine", "timeline"),
    "links": ("core", "engine", "transports", "rendezvous"),
    "context": ("engine", "links", "observe", "rendezvous"),
    "bindings": ("context", "engine", "core.labels", "transports.kernels", "transports.kernels_numpy"),
    "launch": ("rendezvous", "timeline"),
    "numpy": ("bindings", "context", "engine"),
    "jax": ("bindings", "context", "engine"),
    "popart": ("bindings",),
    "torch": ("bindings", "context", "engine", "transports.kernels_torch"),
    "tensorflow": ("bindings", "context", "engine", "keras", "_keras", "rendezvous"),
    "_keras": ("bindings", "context", "engine", "tensorflow", "torch", "jax"),
    "keras": ("bindings", "context", "engine", "_keras"),
    "bench": (*("core", "context", "engine", "launch", "numpy", "torch"),),
    # The old import paths; re-exports only.
    "runner": ("launch", "bindings.later"),
    "common": ("bindings",),
    "data": (),
    # Places of what is not there.
    **dict.fromkeys(("mxnet", "spark", "ray"), ("bindings",)),
}

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "sklearn", "mpi4py")
# Where a framework may be imported, and which. Rooms with a common part import these modules only inside functions.
FRAMEWORK_HOMES = {
    "horovod.torch": ("torch",),
    "horovod.tensorflow": ("tensorflow",),
    "horovod.transports.kernels_torch": ("torch",),
    "horovod.transports.nccl": ("torch",),
    "horovod.transports.on_device": ("torch",),
    "horovod.transports.torch_dist": ("torch",),
    "horovod.transports.mpi": ("mpi4py",),
    "horovod.jax": ("jax", "jaxlib", "optax"),
    "horovod.keras": ("keras",),
    "horovod._keras.on_tensorflow": ("tensorflow",),
    "horovod._keras.on_torch": ("torch",),
    "horovod._keras.on_jax": ("jax",),
    "horovod.world": ("mpi4py",),
    "horovod.rendezvous.mpi": ("mpi4py",),
    "horovod.bench": ("torch", "mpi4py"),
}

# core decides and does nothing else: no clock, no thread, no file, no socket, no chance.
IMPURE = (
    "asyncio", "concurrent", "ctypes", "io", "mmap", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "numpy",
)  # fmt: skip


def room(name: str) -> str:
    """``horovod.core.fusion`` -> ``core``; empty for the ground and the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and f"horovod.{parts[1]}" not in GROUND else ""


def breaches(module: Module) -> list[str]:
    """Every import of ``module`` that goes the wrong way, as a sentence."""
    here, found = room(module.name), []
    for imported in module.imports():
        if reason := _why_not(module, here, imported):
            found.append(f"{module.place}:{imported.line} imports {imported.target}: {reason}")
    return found


def _why_not(module: Module, here: str, imported: Import) -> str:
    target = imported.target
    top = target.split(".")[0]
    if top in FRAMEWORKS:
        homes = [home for home, tops in FRAMEWORK_HOMES.items() if top in tops]
        at_home = any(f"{module.name}.".startswith(f"{home}.") for home in homes)
        return "" if at_home else "a framework has no business here"
    if target in FRAMEWORK_HOMES and here == room(target) and not imported.lazy and target.count(".") > 1:
        return "it loads a framework"
    if top != "horovod":
        return "core is pure" if here == "core" and top in IMPURE else ""
    if module.name in GROUND:
        return "" if target in GROUND[: GROUND.index(module.name)] else "the ground imports nothing above it"
    if target in (*GROUND, SHARED_WORDS, module.name):
        return ""
    if target == "horovod":
        return "take it from the module that defines it"
    if not here:
        return "" if imported.lazy else "the package itself loads nothing"
    allowed = (here, *MAY_IMPORT[here])
    return (
        ""
        if room(target) in allowed or target.removeprefix("horovod.") in allowed
        else f"{here} may import {', '.join(allowed)}"
    )


def circles() -> list[list[str]]:
    """Strongly connected groups of modules, imports inside functions included (the package's lazy ones are not)."""
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


def test_imports_point_the_allowed_way() -> None:
    assert not [breach for module in modules().values() for breach in breaches(module)]


def test_no_circle_of_imports() -> None:
    assert not circles()


def test_every_room_has_its_rule() -> None:
    assert {room(name) for name in modules()} - {""} <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("horovod.core.fusion", "import time", "core is pure"),
        ("horovod.core.fusion", "from horovod.engine import engine", "core may import core"),
        ("horovod.engine.engine", "from horovod.links import local", "engine may import engine, core,"),
        ("horovod.engine.engine", "import horovod.transports.shm.arena", "engine may import engine, core,"),
        ("horovod.observe.stalls", "from horovod.links.shm import board", "observe may import observe, core, engine,"),
        ("horovod.launch.cli", "import horovod.engine", "launch may import launch,"),
        ("horovod.launch.cli", "def f():\n    from horovod import engine", "launch may import launch,"),
        ("horovod.launch.cli", "import torch", "a framework has no business here"),
        ("horovod.transports.base", "import torch", "a framework has no business here"),
        ("horovod.transports.base", "from horovod.transports import kernels_torch", "it loads a framework"),
        ("horovod.bindings.gradients.reducer", "import torch", "a framework has no business here"),
        ("horovod.bindings.gradients.reducer", "from horovod.torch import runtime", "bindings may import bindings,"),
        ("horovod.errors", "from horovod import config", "the ground imports nothing above it"),
        ("horovod", "from horovod.launch import run", "the package itself loads nothing"),
    ],
)  # fmt: skip
def test_a_breach_is_found(name: str, text: str, reason: str) -> None:
    known = modules()["horovod.errors"]
    found = breaches(Module(name, known.path, text, ast.parse(text)))
    assert len(found) == 1
    assert found[0].rpartition(": ")[2].startswith(reason)


def test_the_architecture_names_every_room() -> None:
    table = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## The log")[0]
    rooms = {room(name) for name in modules()} - {""}
    ground = {name.partition(".")[2] for name in GROUND} - {"_version", "config_page"}
    assert not {name for name in rooms | ground if f"`{name}`" not in table}
