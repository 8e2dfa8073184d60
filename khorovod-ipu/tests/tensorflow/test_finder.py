"""The finder answers for one name, behind all others, and loads nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from commands import run
from harness import run_ranks

import khorovod_ipu_finder
from khorovod_ipu_finder import Finder, install


def test_it_answers_for_one_name_only() -> None:
    spec = Finder.find_spec("tensorflow.python.ipu")
    assert spec is not None and str(spec.origin).endswith("tensorflow_python/ipu/__init__.py")
    assert Finder.find_spec("tensorflow.python.ipu.config") is None  # the package's own path leads there
    assert Finder.find_spec("tensorflow.python") is None and Finder.find_spec("ipu") is None


def test_it_comes_once_and_behind_whoever_could_have_a_real_one() -> None:
    install()
    install()
    names = [getattr(finder, "NAME", "") for finder in sys.meta_path]
    assert names.count(khorovod_ipu_finder.NAME) == 1


def test_starting_python_loads_nothing_but_the_finder(tmp_path: Path) -> None:
    code, output = run(
        ["python", "-c", "import khorovod_ipu_finder, sys; print(sorted(m for m in sys.modules if 'ipu' in m))"],
        tmp_path,
    )  # fmt: skip
    assert code == 0
    assert "['khorovod_ipu_finder']" in output


def test_an_ipu_that_tensorflow_itself_has_is_the_one_that_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "vendor" / "tensorflow" / "python" / "ipu"
    package.mkdir(parents=True)
    for folder in (package.parents[1], package.parent, package):
        (folder / "__init__.py").touch()
    code, output = run(
        ["python", "-c", "import khorovod_ipu_finder, tensorflow.python.ipu as ipu; print(ipu.__file__)"], tmp_path,
        PYTHONPATH=str(tmp_path / "vendor"),
    )  # fmt: skip
    assert (code, output.strip()) == (0, str(package / "__init__.py"))


def _estimators() -> list[bool]:
    import importlib

    for name in [name for name in sys.modules if f"{name}.".startswith("tensorflow.python.ipu.")]:
        del sys.modules[name]  # a test before this one, in the same process, has imported it
    # The second of this name takes the place of the first, in every script that imports it so.
    sys.modules.pop("tensorflow.compat.v1", None)
    importlib.import_module("tensorflow.python.ipu")
    first = importlib.import_module("tensorflow.compat.v1")
    import tensorflow as tf

    return [hasattr(module, "estimator") for module in (first, tf, tf.compat.v1, tf.compat.v2)]


def test_estimators_are_there_whichever_is_imported_first() -> None:
    assert run_ranks(1, _estimators, framework="tensorflow") == [[True] * 4]


def test_keras_2_is_one_and_the_same_by_every_way_to_it(tmp_path: Path) -> None:
    script = """
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.keras.layers import Dense
import tensorflow.compat.v1.keras as first
assert Dense is tf.keras.layers.Dense and first is tf.compat.v1.keras
assert ipu.keras.Sequential is tf.keras.Sequential
dataset = tf.data.Dataset.range(3)
iterator = ipu.ipu_infeed_queue.IPUIterator(dataset=dataset)
total = tf.function(lambda numbers: next(numbers) + next(numbers))(iterator)
try:
    ipu.keras.PipelineModel
except AttributeError as error:
    print(Dense.__module__, int(total), error)
"""
    code, output = run(["python", "-c", script], tmp_path)
    assert code == 0 and "tf_keras.src.layers.core.dense 1 tensorflow.python.ipu.keras has no 'PipelineModel'" in output
