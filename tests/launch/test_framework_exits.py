"""Scripts of TensorFlow and JAX under horovodrun, to the end of the process: no hang, and no word too many.

Each uses workers of its own on the way, forked and spawned, which disturb nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import PATIENT, Ended, horovodrun

pytestmark = pytest.mark.slow

TENSORFLOW = """
def prepare():
    import tensorflow as tf
    import horovod.tensorflow as hvd
    hvd.init()
    rows = tf.data.Dataset.from_generator(lambda: iter(range(8)), output_signature=tf.TensorSpec((), tf.int64))
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="step"))
    return hvd, rows.map(tf.identity, num_parallel_calls=2).prefetch(2), lambda x: int(step(x))
"""
JAX = """
def prepare():
    import jax
    import horovod.jax as hvd
    hvd.init()
    step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    return hvd, range(8), lambda x: int(step(x))
"""
# How rank 0 ends while rank 1 is inside of a program; without one, both end their scripts, and nobody calls shutdown().
MAIN = """
import multiprocessing, os, sys

def square(x):
    return x * x

def main(how):
    hvd, rows, step = prepare()
    with multiprocessing.get_context("fork").Pool(1) as fork, multiprocessing.get_context("spawn").Pool(1) as spawn:
        for row in rows:
            assert step(row) == 2 * row
            assert fork.apply(square, (3,)) == spawn.apply(square, (3,)) == 9
    print("through", flush=True)
    if how == "raise" and hvd.rank() == 0:
        raise KeyError("a bug of the user's")
    if how == "os._exit" and hvd.rank() == 0:
        os._exit(5)
    if how:
        step(row)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
FRAMEWORKS = pytest.mark.parametrize("framework", [TENSORFLOW, JAX], ids=["tensorflow", "jax"])


def _run(folder: Path, framework: str, how: str = "") -> Ended:
    script = folder / "train.py"
    script.write_text(framework + MAIN)
    ended = horovodrun("-np", "2", sys.executable, str(script), how, program=PATIENT)
    assert sorted(line for line in ended.lines if "through" in line) == [f"[{r}]<stdout>:through" for r in (0, 1)]
    # Messages of C++ and Python that crash at exit.
    for noise in ("terminate called", "Fatal Python error", "Exception ignored", "core dumped", "oneDNN", "absl::"):
        assert noise not in ended.err
    return ended


@FRAMEWORKS
def test_a_script_that_just_ends(framework: str, tmp_path: Path) -> None:
    ended = _run(tmp_path, framework)
    assert ended.code == 0
    assert "Traceback" not in ended.err
    assert "horovod" not in ended.err


@FRAMEWORKS
def test_an_exception_while_another_rank_is_inside_of_a_program(framework: str, tmp_path: Path) -> None:
    ended = _run(tmp_path, framework, "raise")
    assert ended.code == 1
    assert "PeerLostError: rank 0 (pid " in ended.err
    assert 'ended with KeyError: "a bug of the user\'s" at ' in ended.err


def test_os_exit_while_another_rank_is_inside_of_a_program(tmp_path: Path) -> None:
    ended = _run(tmp_path, JAX, "os._exit")
    assert ended.code == 5
    assert "PeerLostError: rank 0 (pid " in ended.err
