"""The names, arguments and import paths of Horovod."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any
from unittest import mock

import pytest
from harness import on_ranks

import horovod
import horovod.torch as hvd
from horovod.common.util import extension_available
from horovod.core.requests import Kind
from horovod.engine import calls as engine_calls
from horovod.errors import InitError

# Name and arguments as Horovod has them; ours may take more behind them.
SIGNATURES = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async_": "tensors average name op prescale_factor postscale_factor process_set",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "init": "comm process_sets",
    "shutdown": "",
    "is_initialized": "",
    "size": "",
    "rank": "",
    "local_size": "",
    "local_rank": "",
    "cross_size": "",
    "cross_rank": "",
    "is_homogeneous": "",
    "mpi_threads_supported": "",
    "mpi_built": "",
    "mpi_enabled": "",
    "gloo_built": "",
    "gloo_enabled": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups "
        "groups sparse_as_dense process_set"
    ),
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "ProcessSet": "ranks_or_comm",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_function_takes_horovods_arguments(name: str) -> None:
    taken = list(inspect.signature(getattr(hvd, name)).parameters)
    wanted = SIGNATURES[name].split()
    assert taken[: len(wanted)] == wanted
    assert name in hvd.__all__


def test_version_is_the_one_that_libraries_ask_for() -> None:
    assert horovod.__version__ == "0.28.1"  # SynapseML needs this one, Tensorpack one from 0.13.6 on


def test_reductions_have_horovods_numbers() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("horovod", "run __version__"),
        ("horovod.runner", "run"),
        ("horovod.runner.launch", "run_commandline"),
        ("horovod.runner.common.util.env", "get_env_rank_and_size"),
        ("horovod.runner.elastic.worker", "HostUpdateResult WorkerNotificationManager"),
        ("horovod.runner.elastic.discovery", "HostDiscovery FixedHosts"),
        ("horovod.torch.elastic.state", "TorchState StateHandler get_handler_registry set_handler_registry"),
        ("horovod.torch.elastic.state", "ModelStateHandler OptimizerStateHandler SamplerStateHandler"),
        ("horovod.torch.optimizer", "_DistributedOptimizer"),
        ("horovod.torch.mpi_ops", "_basics _handle_map _NULL handle_average_backwards_compatibility _check_has_gpu"),
        ("horovod.torch.mpi_ops", "allreduce_async_ synchronize poll rank size is_homogeneous Average Adasum join"),
        ("horovod.torch.functions", "broadcast_object broadcast_parameters broadcast_optimizer_state allgather_object"),
        ("horovod.torch.optimizer", "DistributedOptimizer"),
        ("horovod.torch.compression", "Compression Compressor NoneCompressor FP16Compressor"),
        ("horovod.torch.sync_batch_norm", "SyncBatchNorm"),
        ("horovod.torch", "_check_has_gpu HorovodInternalError global_process_set Compression"),
        ("horovod.common.basics", "HorovodBasics"),
        ("horovod.common.process_sets", "ProcessSet global_process_set add_process_set remove_process_set"),
        ("horovod.common.exceptions", "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError"),
        ("horovod.common.exceptions", "get_version_mismatch_message"),
        ("horovod.common.util", "gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built env is_iterable"),
        ("horovod.common.util", "get_average_backwards_compatibility_fun num_rank_is_power_2 split_list"),
        ("horovod.common.util", "extension_available is_version_greater_equal_than _cache"),
        ("horovod.data", "BaseDataLoader AsyncDataLoaderMixin"),
        ("horovod.data.data_loader_base", "BaseDataLoader AsyncDataLoaderMixin"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("horovod") else "",
)
def test_import_path_has_the_names(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert not [name for name in names.split() if not hasattr(found, name)]


def test_what_is_not_there_says_so() -> None:
    for statement in ("import horovod.mxnet", "from horovod import mxnet", "import horovod.mxnet.part"):
        with pytest.raises(ImportError, match=r"horovod\.mxnet belongs to .*khorovod does not have it"):
            exec(statement)
    assert not extension_available("mxnet")


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'horovod.torch' has no attribute 'alreduce'"):
        hvd.alreduce
    assert not hasattr(horovod, "alreduce")


@pytest.mark.parametrize("name", ["allreduce_", "allreduce_async", "allgather_async"])
def test_a_tensor_given_twice_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'tensor'"):
        getattr(hvd, name)(1.0, tensor=2.0)


def test_basics_have_the_reductions() -> None:
    from horovod.common.basics import HorovodBasics

    basics = HorovodBasics(__file__, "mpi_lib")
    assert (basics.Average, basics.Sum, basics.Product) == (0, 1, 5)
    assert not basics.is_initialized()


@pytest.mark.parametrize("name", ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"])
def test_before_init_a_value_error_says_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)."):
        getattr(hvd, name)()


@on_ranks(2)
def test_who_and_what_this_is() -> None:
    rank = hvd.rank()
    names = (
        "mpi_built mpi_enabled gloo_built gloo_enabled nccl_built ddl_built ccl_built cuda_built rocm_built "
        "is_homogeneous mpi_threads_supported rank size local_rank local_size cross_rank cross_size is_initialized"
    )
    found = {name: getattr(hvd, name)() for name in names.split()}
    found["again"] = (hvd.init(), hvd.rank(), hvd.init(process_sets="dynamic"), hvd.init([0, 1]))[1]
    basics = hvd.mpi_ops._basics
    found["ids"] = basics._get_process_set_ids_and_ranks()
    found["of set 0"] = (basics._process_set_size(0), basics._process_set_rank(0))
    assert found["nccl_built"] < 2700
    assert all(isinstance(found[name], bool) for name in found if name.endswith("enabled"))
    assert found["is_homogeneous"] is True
    assert [found[name] for name in ("rank", "local_rank", "cross_rank", "again")] == [rank, rank, 0, rank]
    assert [found[name] for name in ("size", "local_size", "cross_size")] == [2, 2, 1]
    assert found["ids"] == {0: [0, 1]}
    assert found["of set 0"] == (2, rank)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3", "HOROVOD_JOB_ID": "a", "HOROVOD_SECRET_KEY": "00ff"}, (1, 3)),
    ],
    ids=["alone", "horovodrun"],
)
def test_rank_and_size_of_the_environment(environ: dict[str, str], wanted: tuple[int, int]) -> None:
    from horovod.runner.common.util.env import get_env_rank_and_size

    with mock.patch.dict(os.environ, environ):
        assert get_env_rank_and_size() == wanted
    with mock.patch.dict(os.environ, {"HOROVOD_RANK": "1"}), pytest.raises(InitError, match="HOROVOD_SIZE"):
        get_env_rank_and_size()


@pytest.mark.parametrize("wrong", [object(), b"grad", 1.5])
def test_a_name_that_is_none_is_an_error_at_the_call(wrong: Any) -> None:
    with pytest.raises(TypeError, match="name must be a string, the same on all ranks"):
        engine_calls.call(Kind.ALLREDUCE, wrong)
