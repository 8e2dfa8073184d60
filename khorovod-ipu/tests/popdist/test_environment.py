"""Instances and replicas as the environment says, and what hands them to TensorFlow and PopART."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import popdist
import popdist.popart
import popdist.tensorflow
from popdist.environment import division


def job(total: int, local: int, offset: int, **more: int) -> dict[str, str]:
    found = {"NUM_TOTAL_REPLICAS": total, "NUM_LOCAL_REPLICAS": local, "REPLICA_INDEX_OFFSET": offset, **more}
    return {f"POPDIST_{name}": str(value) for name, value in found.items()}


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Become an instance of a job."""

    def become(*numbers: int, **more: int) -> None:
        for name, value in job(*numbers, **more).items():
            monkeypatch.setenv(name, value)

    return become


def test_outside_of_poprun_there_is_one_instance_of_one_replica() -> None:
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (1, 1, 0)
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (1, 0, 0)
    assert popdist.getNumIpusPerReplica() == 1 and popdist.getDeviceId() == 0
    assert popdist.checkNumIpusPerReplica(1) and not popdist.checkNumIpusPerReplica(2)


def test_instances_are_derived_from_replicas(instance: Any) -> None:
    instance(8, 2, 4, LOCAL_INSTANCE_INDEX=1, NUM_IPUS_PER_REPLICA=2, UNIFORM_REPLICAS_PER_INSTANCE=1)
    assert popdist.isPopdistEnvSet()
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (8, 2, 4)
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (4, 2, 1)
    assert popdist.checkNumIpusPerReplica(2) and popdist.getDeviceId(2) == 1
    with pytest.raises(RuntimeError, match="poprun --ipus-per-replica=4"):
        popdist.getDeviceId(4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"POPDIST_NUM_TOTAL_REPLICAS": "x"}, "must be a whole number of at least 1; received 'x'"),
        (job(0, 1, 0), "POPDIST_NUM_TOTAL_REPLICAS must be a whole number of at least 1; received '0'"),
        (job(4, 1, -1), "POPDIST_REPLICA_INDEX_OFFSET must be a whole number of at least 0; received '-1'"),
        (job(4, 2, 3), "are more than POPDIST_NUM_TOTAL_REPLICAS=4"),
        (job(4, 3, 0), "need POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=0"),
    ],
)
def test_variables_that_make_no_sense_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        division(environ)
    assert message in str(caught.value)


def test_uneven_instances_cannot_be_counted(instance: Any) -> None:
    instance(5, 2, 3, UNIFORM_REPLICAS_PER_INSTANCE=0)
    assert popdist.getNumLocalReplicas() == 2
    for function in (popdist.getNumInstances, popdist.getInstanceIndex):
        with pytest.raises(RuntimeError, match="needs the same number of replicas on every instance"):
            function()


def test_tensorflows_configuration_gets_device_and_place(instance: Any) -> None:
    instance(8, 2, 4, LOCAL_INSTANCE_INDEX=2)
    place = SimpleNamespace(process_count=1, process_index=0)
    config = SimpleNamespace(select_ipus=[], experimental=SimpleNamespace(multi_replica_distribution=place))
    assert popdist.tensorflow.set_ipu_config(config, configure_device=False) is config
    assert (config.select_ipus, place.process_count, place.process_index) == ([], 4, 2)
    popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
    assert config.select_ipus == 2
    with pytest.raises(RuntimeError, match="poprun --ipus-per-replica=2"):
        popdist.tensorflow.set_ipu_config(config, ipus_per_replica=2)


def test_poparts_options_and_device_get_the_replicas(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    instance(8, 2, 4)
    opts = popdist.popart.configureSessionOptions(SimpleNamespace())
    assert vars(opts) == {
        "enableReplicatedGraphs": True,
        "replicatedGraphCount": 2,
        "enableDistributedReplicatedGraphs": True,
        "globalReplicaOffset": 4,
        "globalReplicationFactor": 8,
    }
    popart: Any = ModuleType("popart")
    popart.DeviceManager = lambda: SimpleNamespace(acquireAvailableDevice=lambda n, **more: (n, more))
    monkeypatch.setitem(sys.modules, "popart", popart)
    assert popdist.popart.getDevice() == (2, {})
    assert popdist.popart.getDevice(1, connectionType="c") == (2, {"connectionType": "c"})
