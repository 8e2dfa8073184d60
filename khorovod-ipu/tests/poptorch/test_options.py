"""Options of PopTorch and of PopDist, and what the data loader makes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import popdist.poptorch
import poptorch


@pytest.fixture
def eight_replicas_on_four_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instance 2 of the job of the tutorial."""
    for name, value in {"NUM_TOTAL_REPLICAS": 8, "NUM_LOCAL_REPLICAS": 2, "REPLICA_INDEX_OFFSET": 4}.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10))


def test_methods_return_the_options_and_what_is_set_can_be_read() -> None:
    options = poptorch.Options().deviceIterations(3).replicationFactor(2).randomSeed(7).enableExecutableCaching("/tmp")
    options.Training.gradientAccumulation(4).accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    options.Precision.enableStochasticRounding(True)
    options._Popart.set("x", 1)
    found = options.toDict()
    assert (found["device_iterations"], found["replication_factor"], found["gradient_accumulation"]) == (3, 2, 4)
    assert found["accumulation_and_replication_reduction_type"] == poptorch.ReductionType.Sum
    assert (found["enableExecutableCaching"], found["enableStochasticRounding"], found["x"]) == ("/tmp", True, 1)


def test_a_misspelt_option_is_told_and_a_wrong_value_refused() -> None:
    with pytest.raises(AttributeError, match="did you mean 'deviceIterations'"):
        poptorch.Options().deviceIteration(3)
    with pytest.raises(AttributeError, match="did you mean 'trainingModel'"):
        poptorch.trainingmodel
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="deviceIterations must be a whole number"):
            poptorch.Options().deviceIterations(wrong)
    poptorch.Options()._Popart.set("groupNormStridedChannelGrouping", False)
    with pytest.raises(NotImplementedError, match="groupNormStridedChannelGrouping=True is not imitated"):
        poptorch.Options()._Popart.set("groupNormStridedChannelGrouping", True)


def test_frozen_options_cannot_be_changed_but_their_copies_can() -> None:
    options = poptorch.Options()
    options._freeze()
    with pytest.raises(AttributeError, match="cannot be changed any more"):
        options.Training.gradientAccumulation(2)
    for twin in (copy.deepcopy(options), options.clone()):
        twin.deviceIterations(5).Training.gradientAccumulation(2)
    assert (options.device_iterations, twin.device_iterations, twin.Training.gradient_accumulation) == (1, 5, 2)


@pytest.mark.usefixtures("eight_replicas_on_four_instances")
def test_popdists_options_are_decided_by_poprun() -> None:
    options = popdist.poptorch.Options(ipus_per_replica=1)
    assert (options.replication_factor, options.Distributed.processId, options.Distributed.numProcesses) == (2, 2, 4)
    blocked = {
        "useIpuId": lambda: options.useIpuId(1),
        "replicationFactor": lambda: options.replicationFactor(1),
        "Distributed.disable": lambda: options.Distributed.disable(),
        "Distributed.setEnvVarNames": lambda: options.Distributed.setEnvVarNames("A", "B"),
        "Distributed.configureProcessId": lambda: options.Distributed.configureProcessId(0, 1),
    }
    for name, call in blocked.items():
        with pytest.raises(RuntimeError, match=f"Cannot call `{name}` with popdist.poptorch.Options"):
            call()
    twin = copy.deepcopy(options)
    assert twin.toDict() == options.toDict() and twin.Distributed.processId == 2
    with pytest.raises(RuntimeError, match="poprun --ipus-per-replica=4"):
        popdist.poptorch.Options(ipus_per_replica=4)


def test_poptorchs_own_options_read_what_mpirun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    options = poptorch.Options()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    options.Distributed.setEnvVarNames("SIZE", "RANK")
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (1, 2)
    assert options.Distributed.disable().numProcesses == 1
    with pytest.raises(ValueError, match="process_id must be at least 0 and below 2; received 2"):
        options.Distributed.configureProcessId(2, 2)


def test_poptorchs_own_options_read_what_horovodrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_RANK", "3")
    options = poptorch.Options()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    options.Distributed.setEnvVarNames("NO_SUCH_SIZE", "NO_SUCH_RANK")
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)


def test_outside_of_poprun_popdists_options_mean_one_replica() -> None:
    options = popdist.poptorch.Options()
    assert (options.replication_factor, options.Distributed.processId, options.Distributed.numProcesses) == (1, 0, 1)


@pytest.mark.usefixtures("eight_replicas_on_four_instances")
def test_the_data_loader_has_the_numbers_of_the_tutorial() -> None:
    data = Rows(50_000)
    assert len(torch.utils.data.DataLoader(data, batch_size=32, drop_last=True)) == 1562
    plain = poptorch.DataLoader(poptorch.Options(), data, batch_size=32)
    ours = poptorch.DataLoader(popdist.poptorch.Options(), data, batch_size=32)
    assert (len(plain), plain.combinedBatchSize) == (390, 32)
    assert (len(ours), ours.combinedBatchSize) == (195, 64)
    assert next(iter(ours)).tolist() == list(range(2 * 12_480, 2 * 12_480 + 64))


def on_instance(index: int, count: int = 3) -> poptorch.Options:
    options = poptorch.Options().randomSeed(5).deviceIterations(2)
    options.Distributed.configureProcessId(index, count)
    return options


@pytest.mark.parametrize("shuffle", [False, True])
def test_instances_divide_the_data_without_overlap_and_anew_in_each_epoch(shuffle: bool) -> None:
    loaders = [poptorch.DataLoader(on_instance(i), Rows(50), batch_size=4, shuffle=shuffle) for i in range(3)]
    epochs = [[x for loader in loaders for batch in loader for x in batch.tolist()] for _ in range(2)]
    assert [len(loader) for loader in loaders] == [2, 2, 2]
    assert all(len(set(seen)) == 48 for seen in epochs)
    assert (epochs[0] != epochs[1]) == shuffle


def test_without_dropping_all_data_are_seen_once() -> None:
    loaders = [poptorch.DataLoader(on_instance(i), Rows(50), batch_size=4, drop_last=False) for i in range(3)]
    assert sorted(x for loader in loaders for batch in loader for x in batch.tolist()) == list(range(50))


def test_what_instances_cannot_divide_is_refused() -> None:
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 3)
    with pytest.raises(ValueError, match=r"set options.randomSeed\(42\), the same on every instance"):
        poptorch.DataLoader(options, Rows(50), shuffle=True)
    with pytest.raises(ValueError, match="auto_distributed_partitioning=False"):
        poptorch.DataLoader(options, Stream())
    order = torch.utils.data.RandomSampler(Rows(50))
    for more in ({"sampler": order}, {"batch_sampler": torch.utils.data.BatchSampler(order, 2, True)}):
        with pytest.raises(ValueError, match=r"or the samples of a sampler.*auto_distributed_partitioning=False"):
            poptorch.DataLoader(options, Rows(50), **more)
        assert len(poptorch.DataLoader(options, Rows(50), auto_distributed_partitioning=False, **more)) > 0
    own = torch.utils.data.DistributedSampler(Rows(48), 3, 0)
    assert len(poptorch.DataLoader(options, Rows(48), batch_size=2, sampler=own)) == 8
    with pytest.raises(ValueError, match="no whole batch for each process: one call takes 40 samples"):
        poptorch.DataLoader(options, Rows(50), batch_size=40)
    assert len(list(poptorch.DataLoader(options, Stream(), batch_size=5, auto_distributed_partitioning=False))) == 2


def test_the_first_names_of_output_modes_are_known() -> None:
    options = poptorch.Options().anchorMode(poptorch.AnchorMode.All)
    assert options.output_mode == poptorch.OutputMode.All


def test_one_process_loads_what_torch_would() -> None:
    loader = poptorch.DataLoader(
        poptorch.Options().replicationFactor(2), Rows(10), batch_size=2, mode=poptorch.DataLoaderMode.Async
    )
    accessor = poptorch.AsynchronousDataAccessor(loader, sharing_strategy=poptorch.SharingStrategy.FileSystem)
    with loader as entered:
        assert len(list(entered)) == 2
    assert [batch.tolist() for batch in accessor] == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(accessor) == 2
    accessor.terminate()


@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12 and newer, on fork beside threads
def test_workers_load_and_can_be_ended() -> None:
    loader = poptorch.DataLoader(poptorch.Options(), Rows(6), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.terminate()


@pytest.mark.parametrize(("name", "kept"), [("broadcastBuffers", True), ("enableSyntheticData", False)])
def test_options_are_refused_where_their_value_would_change_results(name: str, kept: bool) -> None:
    options = poptorch.Options()
    assert getattr(options, name)(kept).toDict()[name] is kept
    with pytest.raises(NotImplementedError, match=f"{name}={not kept} is not imitated"):
        getattr(options, name)(not kept)
    with pytest.raises(NotImplementedError, match=f"{name}={not kept} is not imitated"):
        getattr(options, name)(enabled=not kept)


def test_every_nth_result_needs_an_n() -> None:
    with pytest.raises(ValueError, match="output_return_period must be a whole number of at least 1; received None"):
        poptorch.Options().outputMode(poptorch.OutputMode.EveryN)
    options = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 2)
    assert options.output_return_period == 2
    assert options.outputMode(poptorch.OutputMode.All).output_return_period == 1


def test_instances_divide_samples_without_batches_as_well() -> None:
    loaders = []
    for index in range(2):
        options = poptorch.Options().randomSeed(5)
        options.Distributed.configureProcessId(index, 2)
        loaders += [
            poptorch.DataLoader(options, Rows(6), batch_size=None, shuffle=shuffle) for shuffle in (False, True)
        ]
        with pytest.raises(ValueError, match="auto_distributed_partitioning=False"):
            poptorch.DataLoader(options, Stream(), batch_size=None)
    seen = [[int(x) for x in loader] for loader in loaders]
    assert seen[0] + seen[2] == sorted(seen[1] + seen[3]) == list(range(6))


def test_batches_that_an_accessor_would_make_are_refused() -> None:
    loader = poptorch.DataLoader(poptorch.Options(), Rows(8))
    with pytest.raises(NotImplementedError, match="rebatched_size=4 is not imitated"):
        poptorch.AsynchronousDataAccessor(loader, rebatched_size=4)
    again = poptorch.DataLoaderMode.AsyncRebatched
    with pytest.raises(NotImplementedError, match="mode=AsyncRebatched, an IterableDataset and num_workers=2"):
        poptorch.DataLoader(poptorch.Options(), Stream(), batch_size=4, num_workers=2, mode=again)
    alone = poptorch.DataLoader(poptorch.Options(), Stream(), batch_size=4, mode=again)
    assert [batch.tolist() for batch in alone] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_torchs_loader_refuses_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="shuffle=True"):
        poptorch.DataLoader(poptorch.Options(), Stream(), shuffle=True)
    pairs = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Rows(8)), 2, True)
    with pytest.raises(ValueError, match="mutually exclusive with batch_size"):
        poptorch.DataLoader(poptorch.Options(), Rows(8), batch_size=4, batch_sampler=pairs)


@pytest.mark.parametrize("name", ["loadFromFile", "defaultOutputMode"])
def test_options_that_would_change_others_or_tell_about_them_are_not_only_kept(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(poptorch.Options(), name)
