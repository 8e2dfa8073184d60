"""Population Based Training of Ray Tune over trials with a ``RayExecutor``."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rays

ray = pytest.importorskip("ray", reason="needs: pip install khorovod[ray]")

no_leaks = rays.no_leaks
pytestmark = [*rays.MARKS, pytest.mark.filterwarnings("ignore:Consider boosting PBT performance:UserWarning")]
_STEPS, _RATE = 4, 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        yield
    finally:
        ray.shutdown()


def test_a_trial_goes_on_from_the_checkpoint_of_a_better_one_and_after_a_loss(cluster: None, tmp_path: Path) -> None:
    from ray import tune

    mark = tmp_path / "killed"

    def step(rate: float, found: dict[str, Any]) -> dict[str, Any]:
        import horovod.numpy as hvd

        hvd.init()
        if found["step"] == 3 and hvd.rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = hvd.allreduce(np.arange(2.0) + hvd.rank() + found["step"], op=hvd.Average)
        weights = (np.array(found["weights"]) + rate * gradient).tolist()
        return {"step": found["step"] + 1, "weights": weights, "score": sum(weights), "rates": [*found["rates"], rate]}

    def trial(config: dict[str, float]) -> None:
        from horovod.ray import RayExecutor

        found, checkpoint = {"step": 0, "weights": [0.0, 0.0], "rates": []}, tune.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                found = json.loads((Path(folder) / "state").read_text())
        executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
        executor.start()
        try:
            while found["step"] < _STEPS:
                found, other = executor.run(step, args=[config["rate"], found])
                assert found == other
                with tempfile.TemporaryDirectory() as folder:
                    (Path(folder) / "state").write_text(json.dumps(found))
                    tune.report(found, checkpoint=tune.Checkpoint.from_directory(folder))
        finally:
            executor.shutdown()

    scheduler = tune.schedulers.PopulationBasedTraining(
        "training_iteration", "score", "max", 2, hyperparam_mutations={"rate": [_RATE]}, synch=True
    )
    results = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory([{"CPU": 1}] * 3)),
        param_space={"rate": tune.grid_search([0.1, _RATE])},
        tune_config=tune.TuneConfig(scheduler=scheduler),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), name="run", verbose=0, failure_config=tune.FailureConfig(max_failures=1)
        ),
    ).fit()
    expected = _RATE * sum(np.arange(2.0) + 0.5 + step for step in range(_STEPS))
    assert mark.exists() and not results.errors
    for each in results:
        np.testing.assert_allclose(each.metrics["weights"], expected, rtol=1e-12)
        assert each.metrics["rates"] == [_RATE] * _STEPS
