"""A rank is lost in a training, and another one at a given moment while they recover, commit or end."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import killed_trainings as trainings
import pytest
from elastic_job import ElasticJob

from horovod.core.membership_events import Policy

#: By phase: the function in which the second rank ends itself, before or after it has done its work.
PHASES = {
    "before the ranks meet": ("horovod.links.renewal", "assemble", True),
    "when it has joined": ("horovod.rendezvous.membership_client", "MembershipClient.joined", False),
    "members": ("horovod.bindings.elastic.run", "_exchange", False),
    "sync": ("horovod.bindings.elastic.state", "ObjectState.sync", False),
    "save of a commit": ("horovod.bindings.elastic.state", "ObjectState.save", False),
    "end of a commit": ("horovod.bindings.elastic.state", "State.check_host_updates", True),
    "waiting for the others' end": ("horovod.bindings.elastic.run", "_Job.leave", True),
    "shutdown": ("horovod.bindings.process_sets", "shutdown", True),
}


def _train(folder: str, phase: str) -> dict[str, Any]:
    """Train; slot 2 ends itself in its fourth step, slot 1 in a phase after that."""
    slot, first = os.environ["HOROVOD_SLOT"], Path(folder, "first")
    place, name, is_before = PHASES[phase]
    *owners, name = name.split(".")
    owner: Any = importlib.import_module(place)
    for each in owners:
        owner = getattr(owner, each)
    function, steps = getattr(owner, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = None if is_before and first.exists() else function(*args, **kwargs)
        if first.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if slot == "1":
        setattr(owner, name, dying)
    if slot == "2":
        import torch

        usual = torch.nn.Linear.forward

        def forward(*args: Any) -> Any:
            steps[0] += 1
            if steps[0] == 4:
                first.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*args)

        torch.nn.Linear.forward = forward  # type: ignore[method-assign]
    return trainings.train("torch-commit", folder)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_second_rank_is_lost_in_any_phase(phase: str, tmp_path: Path) -> None:
    (tmp_path / "end").touch()  # of the first epoch
    with ElasticJob(_train, Policy(4, minimum=1), {"a": 4}, (str(tmp_path), phase)) as job:
        ends = job.ends()
    seen = {end.slot.number: end for end in ends}
    assert [seen[number].outcome.exitcode for number in (1, 2)] == [-signal.SIGKILL] * 2
    for number in (0, 3):
        value = seen[number].outcome.value
        assert value is not None, seen[number].outcome.text
        assert trainings.samples_are_whole(value["log"]) == ""
        assert value["log"] == seen[0].outcome.value["log"]
        assert (value["weights"] == trainings.expected(value["log"], has_torch_formula=True)).all()


def _retry() -> tuple[list[float], int]:
    """Add up ones in six steps; an error of the script ends the fourth one on rank 1, which does it again."""
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    state = hvd.elastic.NumpyState(total=np.zeros(2), batch=0)
    errors = {3: OSError("a file cannot be read")} if os.environ["HOROVOD_SLOT"] == "1" else {}

    @hvd.elastic.step
    def one(state: Any) -> None:
        if error := errors.pop(state.batch, None):
            raise error
        state.total = state.total + hvd.allreduce(np.ones(2), op=hvd.Sum, name="ones")
        state.batch += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 6:
            try:
                one(state)
            except OSError:
                one(state)

    train(state)
    return state.total.tolist(), state.progress


@pytest.mark.slow
def test_a_rank_does_a_step_again_that_its_script_has_failed_in() -> None:
    with ElasticJob(_retry, Policy(2, minimum=2), {"a": 2}) as job:
        assert list(job.values().values()) == [([12.0, 12.0], 6)] * 2
