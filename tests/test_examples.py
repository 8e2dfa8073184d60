"""The examples do what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import run
from harness import run_ranks
from sources import ROOT

from scripts import run_script

pytestmark = pytest.mark.slow
# sklearn and torch each bring an OpenMP library; more threads than cores only make the tests slow.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def accuracy(output: str) -> list[float]:
    """Every percentage that a line ``... accuracy 98.7% ...`` gives."""
    return [float(found) for found in re.findall(r"accuracy (\d+\.\d+)%", output)]


def check(code: int, output: str) -> None:
    """It ran, and rank 0, which alone printed the accuracy, has learnt."""
    assert code == 0, output
    assert len(accuracy(output)) == 1, f"printed by rank 0 only:\n{output}"
    assert accuracy(output)[0] >= 97.0, output


def test_digits_reach_97_percent_under_horovodrun() -> None:
    code, output = run("horovodrun -np 3 python examples/torch_digits.py", ROOT, **ONE_THREAD)
    check(code, output)


@pytest.mark.parametrize(
    ("np", "loaded"),
    [(1, "torch"), (2, "tensorflow"), (2, "jax"), (1, "keras-tensorflow"), (2, "keras-torch"), (2, "keras-jax")],
)
def test_digits_reach_97_percent_in_every_framework(np: int, loaded: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{loaded.partition('-')[0]}_digits.py"
    code, output = run_script(script, np, tmp_path, loaded, ["--checkpoint", "best.keras"] if "keras" in loaded else [])
    check(code, output)
    if "keras" in loaded:
        assert (tmp_path / "best.keras").is_file()


def _images_of_two_epochs(path: str) -> list[list[bytes]]:
    import argparse
    import runpy

    import tensorflow as tf

    import horovod.tensorflow as hvd

    tf.random.set_seed(hvd.rank())  # as of whatever script
    example = runpy.run_path(path)
    train, _ = example["load_data"](argparse.Namespace(seed=hvd.size(), batch_size=32))
    return [[image.numpy().tobytes() for images, _ in train for image in images] for _ in range(2)]


def test_ranks_of_the_tensorflow_example_share_out_the_images() -> None:
    ranks = run_ranks(2, _images_of_two_epochs, str(ROOT / "examples" / "tensorflow_digits.py"), framework="tensorflow")
    epochs = [[image for rank in ranks for image in rank[epoch]] for epoch in range(2)]
    for images in epochs:
        assert len(images) == 2 * 22 * 32
        assert len(set(images)) == len(images), "no image is used twice"
    assert epochs[0] != epochs[1]


def test_digits_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    def train(epochs: int) -> str:
        checkpoint = tmp_path / "kept" / "digits.pt"
        arguments = ["--checkpoint", str(checkpoint), "--epochs", str(epochs)]
        code, output = run_script(ROOT / "examples" / "torch_digits.py", 2, tmp_path, "torch", arguments)
        assert code == 0, output
        assert [*checkpoint.parent.iterdir()] == [checkpoint], "rank 0 alone writes, and leaves no part file"
        return output

    (tmp_path / "kept").mkdir()
    train(2)
    assert re.findall(r"epoch (\d)/3", train(3)) == ["3"]


def test_minimal_trains_the_same_on_two_processes_as_without_a_launcher(tmp_path: Path) -> None:
    """``tests/test_docs.py`` starts it by horovodrun, as the README does."""
    one = run("python examples/torch_minimal.py", ROOT, **ONE_THREAD)
    two = run_script(ROOT / "examples" / "torch_minimal.py", 2, tmp_path, "torch")
    assert (one[0], two[0]) == (0, 0), one[1] + two[1]
    (alone,), both = accuracy(one[1]), accuracy(two[1])
    assert len(both) == 2
    assert both == [pytest.approx(alone, abs=0.2)] * 2, one[1] + two[1]
