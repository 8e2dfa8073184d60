"""Uneven data, the commonest failure: who waits in vain is told for what, where the other one ended, and what helps."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from commands import run
from harness import Ranks, on_ranks, run_ranks

import horovod.numpy as hvd
from horovod.bindings.gradients.names import ADASUM, PREFIX
from horovod.core import labels
from horovod.core.labels import LEFT, waited_in_vain
from horovod.core.mismatch import describe_waiting
from horovod.core.requests import Kind, Request
from horovod.engine.times import new_ring
from horovod.errors import PeerLostError
from horovod.observe.ending import Ending


def test_what_waited_and_what_helps() -> None:
    text = waited_in_vain(f"rank 0 {LEFT}", 1, "allreduce 'x' (train.py:7)")
    assert text.startswith(f"rank 0 {LEFT}, while rank 1 waited in allreduce 'x' (train.py:7).")
    assert "hvd.join()" in text and "hvd.uneven_inputs()" in text


def test_a_rank_that_failed_had_no_lack_of_data() -> None:
    text = waited_in_vain("rank 0 ended with ValueError", 1, "allreduce 'x' (train.py:7)")
    assert text == "rank 0 ended with ValueError, while rank 1 waited in allreduce 'x' (train.py:7)"


def test_a_binding_explains_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_labels", {})
    labels.register("Optimizer.", lambda name, times: f"step {times}, {name.partition('.')[2]}")
    labels.register("Silent", lambda name, times: "")
    own = Request("allreduce.Optimizer.layer3", Kind.ALLREDUCE, site="train.py:7")
    assert describe_waiting(own, 118) == "step 118, layer3: allreduce 'Optimizer.layer3' (train.py:7)"
    for name in ("allreduce.other", "allreduce.Silent", ""):
        other = Request(name, Kind.ALLREDUCE, site="train.py:7")
        assert describe_waiting(other, 2).startswith("allreduce ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".bucket0[layer3.weight..layer1.bias]", "DistributedOptimizer step 118, layer3.weight to layer1.bias"),
        ("#2.bucket12[layer3.weight..layer3.weight]", "DistributedOptimizer#2 step 118, layer3.weight"),
        (".layer3.weight", "DistributedOptimizer step 118, layer3.weight"),
        (".survey", "DistributedOptimizer before its first step"),
    ],
)
def test_the_operations_of_an_optimizer_have_a_step_and_parameters(name: str, words: str) -> None:
    assert labels.in_words(PREFIX + name, 118) == words


def test_a_step_that_nobody_has_counted_is_not_told() -> None:
    assert labels.in_words(f"{PREFIX}.layer3.weight", 0) == "DistributedOptimizer, layer3.weight"
    assert labels.in_words(f"{ADASUM}.layer3.weight", 0) == "DistributedOptimizer (Adasum), layer3.weight"


def test_an_optimizer_that_combines_steps_says_so() -> None:
    assert labels.in_words(f"{ADASUM}.layer3.weight", 7) == "DistributedOptimizer (Adasum) step 7, layer3.weight"


@on_ranks(2)
def test_a_training_of_uneven_length_ends_with_step_and_parameters() -> None:
    import torch

    import horovod.torch as hvd

    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    with pytest.raises(PeerLostError) if hvd.rank() else nullcontext() as caught:
        for _ in range(4 if hvd.rank() else 3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    if hvd.rank():
        assert LEFT in str(caught.value)
        told = "while rank 1 waited in DistributedOptimizer step 4, 1.bias to 0.weight: allreduce"
        assert told in str(caught.value)


def _raise() -> None:
    raise KeyError("batch")


def test_an_exception_that_a_finally_sees_is_why_the_rank_leaves() -> None:
    ending, reason = Ending(), ""
    try:
        try:
            _raise()
        finally:
            reason = ending.reason("rank 1", new_ring())
    except KeyError:
        pass
    assert reason.startswith(f"rank 1 ended with KeyError: 'batch' at {__file__}:")


def test_an_exception_that_was_printed_is_why_the_rank_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("bad"), raising=False)
    ending = Ending()
    ending.note_last()
    assert ending.reason("rank 1", new_ring(), "it ended its script") == "rank 1 ended with ValueError: bad"


def _uneven() -> str:
    for _ in range(3 if hvd.rank() else 2):
        try:
            hvd.allreduce(np.ones(3), name="gradient")
        except PeerLostError as error:
            return str(error)
    hvd.shutdown()
    return ""


def _anew_after_an_exception() -> str:
    try:
        _raise()
    except KeyError:
        hvd.shutdown()
    hvd.init()
    return _uneven()


def test_an_exception_before_the_last_init_is_not_why_a_rank_leaves() -> None:
    text = run_ranks(2, _anew_after_an_exception)[1]
    assert LEFT in text
    assert "KeyError" not in text


def test_a_rank_with_more_data_is_told_everything() -> None:
    text = run_ranks(2, _uneven)[1]
    lines = Path(__file__).read_text().splitlines()
    call = next(number for number, line in enumerate(lines, 1) if line == "    hvd.shutdown()")
    operation = next(number for number, line in enumerate(lines, 1) if 'name="gradient")' in line)
    assert f"{LEFT}: it called hvd.shutdown() at {__file__}:{call}" in text
    assert f"its last operation was allreduce 'gradient' ({__file__}:{operation})" in text
    assert f"while rank 1 waited in allreduce 'gradient' ({__file__}:{operation})" in text
    assert "hvd.join()" in text


def _polls_after_the_end_of_rank_0() -> None:
    from horovod import context

    if hvd.rank() == 0:
        return
    peers = context.engine().peers
    peers.wait_for_end(0, 400)
    hvd.allreduce(np.ones(3), name="late")


def test_who_comes_later_is_told_the_same() -> None:
    error = Ranks(2, _polls_after_the_end_of_rank_0).outcomes()[1].error
    assert isinstance(error, PeerLostError)
    assert LEFT in str(error) and "while rank 1 waited in allreduce 'late'" in str(error)
    assert "hvd.join()" in str(error)


IN_RUN = """
import horovod
import numpy as np

def train():
    import horovod.numpy as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("no batch 118")
    hvd.allreduce(np.ones(3), name="gradient")

if __name__ == "__main__":
    from horovod.launch import supervision
    supervision.FAILURE_GRACE_S = supervision.SAFETY_S = 300
    horovod.run(train, np=2)
"""


@pytest.mark.slow
def test_the_exception_of_a_function_of_horovod_run_is_told_to_the_others(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(IN_RUN)
    _, output = run([sys.executable, str(script)], tmp_path, OMP_NUM_THREADS="1")
    [told, *_] = [line for line in output.splitlines() if "PeerLostError: rank 1" in line]
    assert f"ended with ValueError: no batch 118 at {script}:9, while rank 0 waited in allreduce 'gradient'" in told
