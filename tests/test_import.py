"""Modules that an import loads, and those that it leaves alone."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from commands import run

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "sklearn", "mpi4py"}
PROBE = """
import json, os, sys, threading
import {beyond}
before = dict(os.environ), set(os.listdir("/proc/self/fd"))
import {name}
after = dict(os.environ), set(os.listdir("/proc/self/fd"))
print(json.dumps([sorted({{m.partition(".")[0] for m in sys.modules}}), before[0] == after[0],
                  sorted(after[1] - before[1]), threading.active_count()]))
"""


def loaded_by(name: str, beyond: str = "os") -> set[str]:
    """Top-level modules after ``import name`` in a fresh interpreter; it changes nothing else than ``beyond`` does."""
    code, output = run(["python", "-c", PROBE.format(name=name, beyond=beyond)], cwd=Path("/"))
    assert code == 0, output
    loaded, same_environment, new_files, threads = json.loads(output.splitlines()[-1])
    assert same_environment, f"import {name} changes the environment"
    assert not new_files, f"import {name} opens files"
    assert threads == 1, f"import {name} starts a thread"
    return set(loaded)


def loaded_in_turn(*names: str, **environ: str) -> list[set[str]]:
    """Which frameworks a fresh interpreter has after each of these imports."""
    probe = "import sys\n" + "".join(
        f"import {name}\nprint(sorted({{m.partition('.')[0] for m in sys.modules}}))\n" for name in names
    )
    code, output = run(["python", "-c", probe], cwd=Path("/"), TF_CPP_MIN_LOG_LEVEL="3", **environ)
    assert code == 0, output
    lines = [line for line in output.splitlines() if line.startswith("['")]
    assert len(lines) == len(names), output
    return [set(ast.literal_eval(line)) & FRAMEWORKS for line in lines]


@pytest.mark.parametrize("name", ["horovod", "horovod.errors", "horovod.config", "horovod.world"])
def test_the_package_itself_loads_no_framework_and_no_numpy(name: str) -> None:
    assert not loaded_by(name) & {*FRAMEWORKS, "numpy", "rich", "cloudpickle", "yaml"}


@pytest.mark.parametrize("name", ["horovod.launch.command", "horovod.launch.run", "horovod.core", "horovod.rendezvous"])
def test_launcher_and_core_load_no_framework(name: str) -> None:
    assert not loaded_by(name) & {*FRAMEWORKS, "numpy"}


def test_the_numpy_binding_loads_numpy_only() -> None:
    assert loaded_by("horovod.numpy") & {*FRAMEWORKS, "numpy"} == {"numpy"}


def test_the_jax_binding_loads_jax_only() -> None:
    assert loaded_by("horovod.jax", beyond="jax") & FRAMEWORKS == {"jax"}


def test_the_torch_binding_loads_torch_only() -> None:
    assert loaded_by("horovod.torch") & FRAMEWORKS == {"torch"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_keras_binding_loads_keras_and_what_its_backend_loads(backend: str) -> None:
    first, second = loaded_in_turn("keras", "horovod.keras", KERAS_BACKEND=backend)
    assert "keras" in first == second


@pytest.mark.slow
def test_the_bindings_of_tensorflow_and_of_keras_on_it_load_nothing_that_those_do_not() -> None:
    names = ("tensorflow", "horovod.tensorflow", "keras", "horovod.keras")
    tensorflow, ours, keras, ours_of_keras = loaded_in_turn(*names, KERAS_BACKEND="tensorflow")
    assert "tensorflow" in tensorflow == ours
    assert "keras" in keras == ours_of_keras


MISSING = """
import sys
for name in ("torch", "tensorflow", "jax", "keras", "lightning", "ray", "pytorch_lightning"):
    sys.modules[name] = None  # as if it were not there
    try:
        __import__("horovod." + name)
    except ModuleNotFoundError as error:
        assert error.name == name
        print(error)
"""


def test_a_missing_framework_says_what_to_install() -> None:
    code, output = run([sys.executable, "-c", MISSING], cwd=Path("/"))
    assert code == 0, output
    assert output.splitlines() == [
        f"horovod.{name} needs {name}, which is not installed here: pip install 'khorovod[{name}]'"
        for name in ("torch", "tensorflow", "jax", "keras", "lightning", "ray")
    ] + [
        "horovod.pytorch_lightning needs pytorch_lightning, which is not installed here: pip install pytorch_lightning"
    ]
