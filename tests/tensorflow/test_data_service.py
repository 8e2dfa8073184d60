"""TensorFlow's data service, run by one job and used by another."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks, on_ranks


@on_ranks(1, framework="tensorflow")
def test_the_registry_answers_those_who_have_the_key() -> None:
    from horovod.errors import LaunchError
    from horovod.rendezvous.service import Service
    from horovod.tensorflow.data.registry import ComputeClient

    service = Service(b"key", ["127.0.0.1"])
    try:
        place = ("127.0.0.1", int(service.endpoints[0].rpartition(":")[2]))
        client, late = (ComputeClient([place], b"key", 2, 2, timeout_s) for timeout_s in (60.0, 0.5))
        stranger = ComputeClient([place], b"other", 2, 2, 0.5)
        waiting: list[str] = []
        thread = threading.Thread(target=lambda: waiting.append(client.wait_for_dispatcher_registration(1, 300.0)))
        thread.start()
        client.register_dispatcher(1, "grpc://here:1")
        thread.join()
        assert waiting == ["grpc://here:1"]
        with pytest.raises(LaunchError, match="registered already"):
            client.register_dispatcher(1, "grpc://there:1")
        with pytest.raises(ValueError, match="dispatcher must be from 0 to 1; received 2"):
            client.register_dispatcher(2, "grpc://here:2")
        with pytest.raises(LaunchError, match="did not register within"):
            client.wait_for_dispatcher_registration(0, 0.01)
        client.register_worker_for_dispatcher(0, 0)
        with pytest.raises(LaunchError, match="not all of the 2 workers"):
            client.wait_for_dispatcher_worker_registration(0, 0.01)
        client.register_worker_for_dispatcher(0, 1)
        client.wait_for_dispatcher_worker_registration(0, 300.0)
        with pytest.raises(LaunchError, match="no data service answers"):
            stranger.shutdown()
        before = threading.active_count()
        rude = [socket.create_connection(place) for _ in range(100)]
        for each in rude:
            each.sendall(b"\xff" * 1000)
        client.wait_for_dispatcher_worker_registration(0, 300.0)
        assert threading.active_count() == before
        for each in rude:
            each.close()
        client.shutdown()
        client.wait_for_shutdown()
    finally:
        service.close()
    with pytest.raises(LaunchError, match="no data service answers"):
        late.shutdown()
    late.wait_for_shutdown()


def _compute(file: str, arguments: list[str]) -> None:
    from horovod.tensorflow.data import compute_worker

    compute_worker.main([file, *arguments])


def _train(file: str, side: str) -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

    config = TfDataServiceConfig.read(file, wait_for_file_creation=True)
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    numbers = tf.data.Dataset.range(40).map(lambda number: number * 2)
    if side == "training":
        with pytest.raises(RuntimeError, match="tf_data_service"):
            numbers.send_to_data_service(config, hvd.rank())
        with tf_data_service(config, hvd.rank()) as address:
            distributed = numbers.apply(
                tf.data.experimental.service.distribute("distributed_epoch", address, job_name="shared")
            )
            found = [int(number) for number in distributed]
            hvd.barrier()
        return found
    with pytest.raises(ValueError, match="round_robin"):
        numbers.send_to_data_service(config, hvd.rank(), round_robin=True)
    shared = numbers.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    found = [int(number) for number in shared]
    hvd.barrier()
    if hvd.rank() == 0:
        config.compute_client().shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("side", ["compute", "training"])
def test_ranks_share_what_the_workers_of_another_job_prepare(side: str, tmp_path: Path) -> None:
    file = str(tmp_path / "service.json")
    arguments: Any = (file, ["--dispatcher-side", side, "--timeout", "300"])
    workers = Ranks(2, _compute, arguments, framework="tensorflow")
    training = Ranks(2, _train, (file, side), framework="tensorflow").outcomes()
    for outcome in (*training, *workers.outcomes()):
        assert outcome.error is None, outcome.text
    assert sorted(training[0].value + training[1].value) == list(range(0, 80, 2))
    assert Path(file).stat().st_mode & 0o777 == 0o600


@on_ranks(1, framework="tensorflow", fresh=True)
def test_workers_must_divide_among_dispatchers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of the number of dispatchers"):
        _compute(str(tmp_path / "f"), ["--dispatchers", "2"])
