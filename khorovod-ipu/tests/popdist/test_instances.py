"""Several instances: collectives, execute_on_instances, and training that equals one instance on the whole batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_ranks

import horovod.torch as hvd
import popdist
import popdist.poptorch
import poptorch
from popdist import backend

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def instance(index: int, count: int, local: int = 1, connect: bool = True) -> Iterator[None]:
    """Set the environment that poprun gives one instance."""
    values = {"NUM_TOTAL_REPLICAS": count * local, "NUM_LOCAL_REPLICAS": local, "REPLICA_INDEX_OFFSET": index * local}
    names = {f"POPDIST_{name}": str(value) for name, value in values.items()}
    os.environ.update(names)
    try:
        if connect:
            popdist.init()
        yield
    finally:
        if popdist.isBackendInitialized():
            popdist.finalizeBackend()
        for name in names:
            del os.environ[name]


def failure(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, hvd.HorovodInternalError) as error:
        return str(error)
    return ""


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def collectives() -> list[Any]:
    rank, size = rank_and_size()
    with instance(rank, size):
        popdist.init()  # again: nothing happens
        mine = np.full(3, rank + 1.0)
        tensor = torch.full((2,), rank, dtype=torch.bfloat16, requires_grad=True)
        into = np.zeros(size * 2)
        found = [
            popdist.broadcast(mine.copy(), rootRank=2).tolist(),
            popdist.allReduceSum(mine.copy(), name="sum").tolist(),
            popdist.allGather(np.array([rank, -rank])).tolist(),
            popdist.allGather(np.array([rank, 0.5]), out=into) is into and into.tolist(),
            popdist.broadcast(tensor, 1).tolist(),
            popdist.allGather(torch.tensor(rank)).tolist(),
        ]
        popdist.registerCommunicator({0, 2}, 7)
        if rank != 1:
            found.append(popdist.allReduceSum(np.array([rank]), communicator=7).tolist())
            found.append(failure(popdist.broadcast, mine, rootRank=1, communicator=7))
        else:
            found.append(failure(popdist.allReduceSum, mine, communicator=7))
            found.append(failure(popdist.allReduceSum, mine, communicator=8))
        return found


def test_collectives_move_what_they_should() -> None:
    outcomes = run_ranks(3, collectives, init=False)
    everybody = [
        [3.0, 3.0, 3.0], [6.0, 6.0, 6.0], [[0, 0], [1, -1], [2, -2]], [0, 0.5, 1, 0.5, 2, 0.5], [1.0, 1.0], [0, 1, 2],
    ]  # fmt: skip
    assert [found[:6] for found in outcomes] == [everybody] * 3
    assert (
        outcomes[0][6:] == outcomes[2][6:] == [[2], "popdist.broadcast(): rootRank=1 is none of the instances [0, 2]"]
    )
    assert "instance 1 is not in communicator 7, which has [0, 2]" in outcomes[1][6]
    assert "there is no communicator 8" in outcomes[1][7]


def partial() -> list[Any]:
    rank, size = rank_and_size()
    with instance(rank, size):
        mine = np.array([float(rank)])

        def add(factor: float, shift: float = 0.0) -> float:
            return float(popdist.allReduceSum(mine * factor)[0] + shift)

        def alone() -> float:
            return popdist.execute_on_instances({rank}, add, 10.0) or 0.0  # a set within a set

        found: list[Any] = [
            popdist.execute_on_instances({0}, add, 5.0, shift=1.0),
            popdist.execute_on_instances({1, 2}, add, 1.0),
            popdist.execute_on_instances([2, 1], alone),
            popdist.execute_on_instances(range(3), add, 1.0),
            failure(popdist.execute_on_instances, {3}, add, 1.0),
            failure(popdist.execute_on_instances, set(), add, 1.0),
        ]
        if rank == 2:  # one instance may as well be asked alone
            found.append(
                popdist.execute_on_instances({2}, lambda: failure(popdist.execute_on_instances, {1}, add, 1.0))
            )
        # An error inside leaves nothing confined.
        with contextlib.suppress(ZeroDivisionError):
            popdist.execute_on_instances({rank}, lambda: 1 / 0)
        return [*found, add(1.0)]


def test_functions_run_on_the_instances_that_are_named_and_collectives_stay_among_them() -> None:
    zero, one, two = run_ranks(3, partial, init=False)
    assert zero[:4] == [1.0, None, None, 3.0]
    assert one[:4] == [None, 3.0, 10.0, 3.0]
    assert two[:4] == [None, 3.0, 20.0, 3.0]
    assert zero[4] == "instances [3]: name at least one of 0 to 2" and zero[5].startswith("instances []: name at least")
    assert two[6] == "instances [1] are not all among [2], where this runs"
    assert zero[-1] == one[-1] == two[-1] == 3.0


def train_in_part() -> list[float] | None:
    rank, size = rank_and_size()

    def step() -> list[float]:
        weight = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(weight.weight, float(rank))  # those of the first instance that takes part count
        net = torch.nn.Module()
        net.weight = weight
        net.forward = lambda x: poptorch.identity_loss(weight(x), "mean")
        optimizer = poptorch.optim.SGD(net.parameters(), lr=1.0)
        poptorch.trainingModel(net, popdist.poptorch.Options(), optimizer)(torch.tensor([[float(rank)]]))
        return [float(weight.weight)]

    with instance(rank, size):
        import popdist.poptorch  # what only a function inside of this one names does not travel to the ranks

        return popdist.execute_on_instances({1, 2}, step)


def test_some_instances_may_train_by_themselves() -> None:
    assert run_ranks(3, train_in_part, init=False) == [None, [1 - 1.5], [1 - 1.5]]


def with_popart() -> list[float]:
    rank, size = rank_and_size()
    with instance(rank, size, local=2):
        import popart
        import popdist.popart

        builder = popart.Builder()
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1, 2]))
        w = builder.addInitializedInputTensor(np.ones([2, 1], np.float32), "w")
        loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 1.0, reduction=popart.ReductionType.Sum)
        opts = popart.SessionOptions()
        opts.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        popdist.popart.configureSessionOptions(opts)
        session = popart.TrainingSession(
            builder.getModelProto(), popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}), loss,
            popart.SGD({"defaultLearningRate": (0.5, True)}), popdist.popart.getDevice(), userOptions=opts,
        )  # fmt: skip
        session.prepareDevice()
        session.weightsFromHost()
        first = popdist.getReplicaIndexOffset()
        data = np.array([[[first + 1.0] * 2], [[first + 2.0] * 2]], np.float32)
        session.run(popart.PyStepIO({x: data}, session.initAnchorArrays()))
        session.weightsToHost()
        found = {"w": np.zeros([2, 1], np.float32)}
        session.readWeights(popart.PyWeightsIO(found))
        return [float(value) for value in found["w"].ravel()]


def test_popart_takes_the_mean_over_the_replicas_of_all_instances() -> None:
    assert run_ranks(2, with_popart, init=False) == [[1 - 0.5 * 2.5] * 2] * 2


def checks() -> list[str]:
    rank, size = rank_and_size()
    found = []
    with instance(rank, size, connect=False):
        found.append(failure(popdist.allReduceSum, np.ones(1)))
        found.append(failure(popdist.execute_on_instances, {0, 1}, print))
        found.append(failure(popdist.finalizeBackend))
    found.append(failure(popdist.init))  # poprun did not start it
    with instance(rank, 3, connect=False):
        found.append(failure(popdist.init))
    assert not hvd.is_initialized()
    with instance(rank, size):
        found.append(failure(popdist.initializeBackend))
        found.append(failure(popdist.allReduceSum, [1, 2]))
        read_only = np.ones(1)
        read_only.flags.writeable = False
        found.append(failure(popdist.broadcast, read_only))
        found.append(failure(popdist.allGather, np.ones(2), out=np.ones(3)))
        found.append(failure(popdist.registerCommunicator, {0}, 0))
        found.append(failure(popdist.allReduceSum, np.ones(1 + rank), name="shapes"))
    assert not backend._backend.groups
    return found


def test_what_is_wrong_is_said_with_the_remedy() -> None:
    expected = [
        "Call popdist.init() once, at the beginning of the program on every instance",
        "popdist.execute_on_instances() needs the other instances",
        "call popdist.init() before finalizeBackend()",
        "Start the program with poprun --num-replicas=2 --num-instances=2",
        "but the POPDIST_ variables say instance",
        "is initialized already",
        "writes into a numpy array or a torch tensor, received list",
        "this one is read-only",
        "out needs 4 elements of float64, received 3 of float64",
        "communicator 0 exists already",
        "rank 1",
    ]
    for found in run_ranks(2, checks, init=False):
        assert [want in said for want, said in zip(expected, found, strict=True)] == [True] * len(expected), found


class Net(torch.nn.Module):
    """A model whose weights are different on each instance until it is compiled."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        out = self.layers(x)
        return out, poptorch.identity_loss(torch.nn.functional.mse_loss(out, target), reduction="mean")


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        source = torch.Generator().manual_seed(11)
        self.x, self.y = torch.randn(96, 4, generator=source).double(), torch.randn(96, 2, generator=source).double()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def train(kind: str) -> list[float]:
    rank, size = rank_and_size()
    with instance(rank, size, local=2, connect=kind != "without init"):
        options = popdist.poptorch.Options().randomSeed(3)
        options.Training.gradientAccumulation(2)
        net = Net(rank)
        model = poptorch.trainingModel(net, options, poptorch.optim.AdamW(net.parameters(), lr=0.01))
        with (
            pytest.warns(UserWarning, match=r"call popdist.init\(\)")
            if kind == "without init"
            else (contextlib.nullcontext())
        ):
            model.compile()
        loader = poptorch.DataLoader(options, Data(), batch_size=2, shuffle=True)
        for _ in range(2):
            for x, y in loader:
                model(x, y)
        # A function for the first instance alone waits for no other one.
        popdist.execute_on_instances({0}, poptorch.inferenceModel(net), x, y)
        return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def alone(size: int) -> torch.Tensor:
    """The same, as torch does it in one process: the batches of all instances together."""
    net, order, data = Net(0), torch.Generator(), Data()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    per_call = 8
    each = 96 // (per_call * size) * per_call
    for epoch in range(2):
        index = torch.randperm(96, generator=order.manual_seed(3 + epoch))
        parts = [index[i * each : (i + 1) * each] for i in range(size)]
        for start in range(0, each, per_call):
            chosen = torch.cat([part[start : start + per_call] for part in parts])
            optimizer.zero_grad()
            net(data.x[chosen], data.y[chosen])[1].backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(("size", "kind"), [(1, "init"), (2, "without init"), (3, "init")])
def test_instances_train_as_one_process_does_on_the_whole_batch(size: int, kind: str) -> None:
    found = [torch.tensor(values, dtype=torch.float64) for values in run_ranks(size, train, kind, init=False)]
    assert all(torch.equal(found[0], other) for other in found)
    torch.testing.assert_close(found[0], alone(size), rtol=1e-10, atol=1e-12)


def resume() -> tuple[list[float], int]:
    rank, size = rank_and_size()
    with instance(rank, size):
        net = Net(0)
        optimizer = poptorch.optim.Adam(net.parameters(), lr=0.01 if rank == 0 else 0.5)
        x, y = Data()[:8]
        mine = x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]
        if rank == 0:  # as with a checkpoint that the first instance alone has read
            net(x, y)[1].backward()
            optimizer.step()
        model = poptorch.trainingModel(net, popdist.poptorch.Options(), optimizer)
        for _ in range(3):
            model(*mine)
        return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(), len(optimizer.state)


def test_instances_go_on_with_the_optimizer_of_the_first_one() -> None:
    net, (x, y) = Net(0), Data()[:8]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        net(x, y)[1].backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for found, states in run_ranks(2, resume, init=False):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
        assert states == 4


def set_apart() -> list[float]:
    rank, size = rank_and_size()
    with instance(rank, size):
        net = Net(0)
        x, y = Data()[:12]
        mine = x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]
        model = poptorch.trainingModel(net, popdist.poptorch.Options(), poptorch.optim.SGD(net.parameters(), lr=0.1))
        for own in ({}, {1: 0.5}, {0: 0.2, 1: 0.4, 2: 0.8}, {2: 0.9}):  # None but the first instance's rates count.
            if rank in own:
                more = {"loss_scaling": 4.0 ** (rank + 1), "max_grad_norm": 0.01 * rank or None}
                model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=own[rank], **more))
            model(*mine)
        return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def test_hyperparameters_that_some_instances_alone_set_are_those_of_the_first_one() -> None:
    net, (x, y) = Net(0), Data()[:12]
    for rate in (0.1, 0.1, 0.2, 0.2):
        net.zero_grad()
        net(x, y)[1].backward()
        torch.optim.SGD(net.parameters(), lr=rate).step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for found in run_ranks(3, set_apart, init=False):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


def differ() -> list[str]:
    rank, size = rank_and_size()
    found = []
    with instance(rank, size):
        for make in (
            lambda: popdist.poptorch.Options().randomSeed(rank),
            lambda: popdist.poptorch.Options().deviceIterations(rank + 1),
        ):
            found.append(failure(poptorch.trainingModel(Net(0), make()).compile))
        net, kind = Net(0), (poptorch.optim.SGD, poptorch.optim.Adam)[rank]
        model = poptorch.trainingModel(net, popdist.poptorch.Options(), kind(net.parameters(), lr=0.1))
        found.append(failure(model.compile))
        elsewhere = poptorch.Options()
        elsewhere.Distributed.configureProcessId(0, 5)
        found.append(failure(poptorch.trainingModel(Net(0), elsewhere).compile))
    return found


def test_instances_that_train_different_things_are_named() -> None:
    for found in run_ranks(2, differ, init=False):
        assert "random seed differ (instance 0: 0, instance 1: 1)" in found[0]
        assert "device iterations differ (instance 0: 1, instance 1: 2)" in found[1]
        assert "class of the optimizer differ (instance 0: SGD, instance 1: Adam)" in found[2]
        assert "options.Distributed says process 0 of 5" in found[3] or "but this is rank" in found[3]
