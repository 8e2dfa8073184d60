"""Arguments that DistributedOptimizer refuses, and its attributes; one rank is enough."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.errors import NotInitializedError, RequestError
from horovod.torch.adapter import TorchAdapter


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of one."""
    hvd.init()
    yield
    hvd.shutdown()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class _OnlyCompresses(hvd.Compression.none.__base__):  # type: ignore[name-defined,misc]
    """A compressor without ``decompress``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None


@pytest.mark.parametrize("name", ["allreduce", "allreduce_async", "grouped_allreduce_async_", "reducescatter_async"])
def test_errors_about_the_number_of_arguments_name_a_public_function(name: str) -> None:
    plain = re.sub("^grouped_|_async|_$", "", name)
    with pytest.raises(TypeError, match=rf"^{plain}\(\) takes from 1 to \d positional arguments but 9 were given"):
        getattr(hvd, name)(*range(9))
    with pytest.raises(TypeError, match=rf"^({plain}|{name})\(\) missing 1 required positional argument: 'tensors?'"):
        getattr(hvd, name)()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: hvd.grouped_allreduce([x, 3]), "expected a torch.Tensor, received int"),
        (lambda x: hvd.allreduce(x, compression=_OnlyCompresses), r"must have compress\(\) and decompress\(\)"),
        (lambda x: hvd.alltoall(x, splits="ab"), "splits must be a sequence of integers. Received: 'ab'"),
        (lambda x: hvd.allreduce(x, prescale_factor=None), "must be finite numbers. Received: None, 1.0"),
        (lambda x: hvd.allreduce(x, postscale_factor="a"), "must be finite numbers. Received: 1.0, 'a'"),
        (lambda x: hvd.allreduce(x, prescale_factor="2"), "must be finite numbers. Received: '2', 1.0"),
        (lambda x: hvd.allreduce(x, prescale_factor=[2.0]), r"must be finite numbers. Received: \[2.0\], 1.0"),
        (lambda x: hvd.allreduce(x, postscale_factor=math.nan), "must be finite numbers. Received: 1.0, nan"),
        (lambda x: hvd.remove_process_set(3), "must be a ProcessSet, .*received 3 of type int"),
        (lambda x: hvd.zeros(2, -1), r"dimensions must be whole numbers, 0 or more. Received: \(2, -1\)"),
        (lambda x: hvd.zeros("3"), r"dimensions must be whole numbers, 0 or more. Received: \('3',\)"),
        (lambda x: hvd.zeros(2.5), r"dimensions must be whole numbers, 0 or more. Received: \(2.5,\)"),
        (lambda x: hvd.alltoall(x, splits=[1.5]), r"sequence of integers. Received: torch.float32, 1 dimensions$"),
        (lambda x: hvd.zeros(2, dtype="foo"), "dtype must be one of bool, .* Received: 'foo'"),
    ],
)
def test_arguments_of_collectives_that_do_not_fit_are_named(call: Callable[[torch.Tensor], Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call(torch.ones(4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be a finite number .* Received: 0.0"),
        ({"gradient_predivide_factor": float("inf")}, "must be a finite number other than 0. Received: inf"),
        ({"gradient_predivide_factor": "2"}, "must be a finite number other than 0. Received: '2'"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be an integer, 1 or more. Received: 0"),
        ({"backward_passes_per_step": 1.5}, "must be an integer, 1 or more. Received: 1.5"),
        ({"backward_passes_per_step": "2"}, "must be an integer, 1 or more. Received: '2'"),
        ({"backward_passes_per_step": True}, "must be an integer, 1 or more. Received: True"),
        ({"named_parameters": [torch.zeros(1)]}, "Received one that is Tensor"),
        ({"named_parameters": torch.nn.Linear(1, 1)}, "Received: Linear"),
        ({"named_parameters": [("a", torch.zeros(1)), ("a", torch.zeros(1))]}, "Received several times: a"),
        ({"named_parameters": [("a", torch.zeros(1))]}, "Received no name for 4"),
        ({"groups": -1}, "groups must be a number"),
        ({"groups": "two"}, "groups must be a number"),
        ({"groups": [torch.zeros(2)]}, "a list of lists of parameters"),
        ({"groups": [net().parameters()]}, "a list of lists of parameters"),
        ({"groups": [["weight"]]}, "groups must hold parameters. Received: str"),
        ({"groups": [[torch.ones(1)]]}, "groups must hold parameters. Received: Tensor"),
        ({"op": 77}, "op must be Average, Sum, Adasum, Min, Max or Product, received 77"),
        ({"op": "avg"}, "op must be Average"),
        ({"process_set": [0, 1]}, r"must be a ProcessSet, .* received \[0, 1\] of type list"),
        ({"compression": torch.float16}, "such as hvd.Compression.fp16. Received: torch.float16"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        hvd.DistributedOptimizer(sgd(net()), **options)


def test_a_model_is_no_optimizer() -> None:
    with pytest.raises(RequestError, match=rf"such as torch.optim.SGD.* Received: Sequential \(at {__file__}:"):
        hvd.DistributedOptimizer(net())  # type: ignore[arg-type]


def test_a_parameter_twice_in_groups_is_refused() -> None:
    model = net()
    weight = next(iter(model.parameters()))
    with pytest.raises(ValueError, match="twice in groups"):
        hvd.DistributedOptimizer(sgd(model), groups=[[weight], [weight]])


def test_groups_may_hold_parameters_that_are_not_trained() -> None:
    model = net()
    first, *others = model.parameters()
    first.requires_grad_(False)
    plain = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([others[0], plain], lr=0.1)
    assert len(hvd.DistributedOptimizer(optimizer, groups=[[first, *others], [plain]])._groups) == 2


def test_wrapping_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(net())))


def test_num_groups_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(sgd(net()), num_groups=3)
    assert [len(group) for group in optimizer._groups] == [2, 1, 1]


def test_it_needs_init() -> None:
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.DistributedOptimizer(sgd(net()))


def test_it_is_an_optimizer_of_the_same_class() -> None:
    model = net()
    plain = sgd(model)
    plain.state[model[0].weight]["momentum_buffer"] = torch.ones(2, 2)  # type: ignore[index]
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=2)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert optimizer.defaults == plain.defaults
    assert optimizer.op == hvd.Average
    assert optimizer.process_set is hvd.global_process_set
    assert optimizer.backward_passes_per_step == 2
    assert list(optimizer._parameter_names.values()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert set(optimizer._allreduce_delay.values()) == {2}
    assert optimizer._requires_update == set(model.parameters())
    assert optimizer._handles == {}
    assert optimizer.find_duplicates(["a", "b", "a"]) == {"a"}


def test_parameters_without_names_are_numbered() -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([{"params": [p]} for p in net().parameters()], lr=0.1))
    names = [f"allreduce.noname.{group}.0" for group in range(4)]
    assert list(optimizer._parameter_names.values()) == names


def test_one_rank_trains_as_without_it() -> None:
    torch.manual_seed(0)
    ours = net()
    theirs = net()
    theirs.load_state_dict(ours.state_dict())
    optimizer, plain = hvd.DistributedOptimizer(sgd(ours), ours.named_parameters()), sgd(theirs)
    for step in range(3):
        x = torch.full((4, 2), float(step))
        for model, one in ((ours, optimizer), (theirs, plain)):
            one.zero_grad()
            model(x).square().sum().backward()
            one.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert not ours[0].weight._post_accumulate_grad_hooks  # type: ignore[index]


def test_step_hooks_run_once() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("made", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_copy_is_a_plain_optimizer(made: Callable[[Any], Any], op: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=op)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    model, other = made((model, optimizer))
    assert type(other) is torch.optim.SGD and other.param_groups[0]["lr"] == pytest.approx(0.01)
    assert len(other.state) == 4
    again = hvd.DistributedOptimizer(other, model.named_parameters(), op=op)
    again.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    again.step()


@pytest.mark.parametrize("name", ["allreduce", "allgather", "alltoall", "reducescatter", "allreduce_"])
def test_what_is_no_tensor_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, received float"):
        getattr(hvd, name)(0.5)


def test_what_fails_on_one_rank_alone_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = hvd.allreduce_async(torch.full((2,), 1.0))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(TorchAdapter, "empty", _no_memory)
        hvd.synchronize(waiting)
    for number in range(3):
        assert hvd.allreduce(torch.full((2,), float(number))).tolist() == [number, number]


def _no_memory(*_: Any) -> Any:
    raise MemoryError


def test_a_scheduler_made_before_still_sets_the_rate() -> None:
    plain = sgd(net())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.step()
    scheduler.step()  # without a warning that nothing has stepped yet
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_scheduler_made_before_still_sets_the_rate_after_a_checkpoint_is_loaded() -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert plain.state_dict() == optimizer.state_dict()
    assert len(plain.state) == 4


def test_a_scheduler_made_before_still_sets_the_rate_of_new_groups() -> None:
    model = net()
    plain = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    optimizer.param_groups = [{**optimizer.param_groups[0], "initial_lr": 0.1}]  # as Lightning's BaseFinetuning resumes
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert plain.param_groups is optimizer.param_groups


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool]
)
@pytest.mark.parametrize(("name", "wire"), [("none", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_compression_casts_floating_point_only(name: str, wire: torch.dtype | None, dtype: torch.dtype) -> None:
    compression = getattr(hvd.Compression, name)
    tensor = torch.ones(3, dtype=dtype)
    packed, context = compression.compress(tensor)
    assert packed.dtype is (wire if wire is not None and dtype.is_floating_point else dtype)
    restored = compression.decompress(packed, context)
    assert restored.dtype is dtype
    assert torch.equal(restored, tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_is_refused_with_a_remedy() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(ValueError, match="cannot be sent as it is"):
            hvd.allreduce(torch.nested.nested_tensor(parts, layout=layout))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_sparse_tensor_is_refused_with_a_remedy_for_its_layout() -> None:
    table = torch.eye(2)
    with pytest.raises(ValueError, match=r"use to_dense\(\), or sparse_allreduce_async\(\)$"):
        hvd.allreduce(table.to_sparse())
    with pytest.raises(ValueError, match=r"use to_dense\(\)$"):  # sparse_allreduce_async takes COO only
        hvd.allreduce(table.to_sparse_csr())


def test_an_expanded_tensor_in_place_is_refused_at_the_call() -> None:
    expanded = torch.zeros(1).expand(4)
    for operation in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(ValueError, match=r"several of its elements share memory; pass tensor.clone"):
            operation(expanded)
    assert torch.equal(hvd.allreduce(expanded), torch.zeros(4))


def test_an_empty_tensor_of_a_device_has_no_elements_that_share_memory() -> None:
    from paper_device import PaperAdapter

    PaperAdapter().target(torch.zeros(0).as_strided((0, 4), (0, 0)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: hvd.allreduce(x, average=True),
        lambda x: hvd.allreduce(x.clone().requires_grad_(), average=True),
        lambda x: hvd.allreduce_(x, average=False),
        lambda x: hvd.synchronize(hvd.allreduce_async(x, average=True)),
        lambda x: hvd.grouped_allreduce([x], average=True),
        lambda x: hvd.grouped_allreduce([x], average=True, compression=hvd.Compression.fp16),
        lambda x: hvd.DistributedOptimizer(sgd(net()), num_groups=1),
    ],
)  # fmt: skip
def test_what_is_deprecated_is_told_at_the_users_line(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.warns(DeprecationWarning) as caught:
        call(torch.ones(3))
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, call.__code__.co_firstlineno)]


COMPILED = """
import torch, horovod.torch as hvd
hvd.init()

@torch.compile(backend="eager")
def f(x):
    return hvd.allreduce(x * 2, name="y") + 1

assert f(torch.ones(3)).tolist() == [3.0] * 3
"""


@pytest.mark.slow
def test_a_collective_in_a_function_that_is_compiled_later_than_init_makes_no_noise() -> None:
    found = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=500)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
