"""Optimizers and values that would be passed over without a word are refused."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch

X = torch.ones(8, 3)


class Net(torch.nn.Module):
    def __init__(self, result: Callable[[torch.Tensor], Any] = lambda y: y.mean()) -> None:
        super().__init__()
        self.layer, self.result = torch.nn.Linear(3, 2), result

    def forward(self, x: Any) -> Any:
        return self.result(self.layer(torch.as_tensor(x["x"] if isinstance(x, collections.UserDict) else x)))


@dataclasses.dataclass
class Result:
    y: torch.Tensor


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    net, other = Net(), Net()
    with pytest.raises(ValueError, match="has no parameter of this model"):
        poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(other.parameters(), lr=0.1))
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has no parameter of this model"):
        model.setOptimizer(poptorch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="groups of parameters are not those of the optimizer before"):
        model.setOptimizer(poptorch.optim.SGD([net.layer.weight, other.layer.bias], lr=0.1))
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.2))


@pytest.mark.parametrize("result", [lambda y: Result(y), lambda y: (y, float(y.detach()[0, 0]))])
def test_results_that_micro_batches_cannot_join_are_refused(result: Callable[[torch.Tensor], Any]) -> None:
    model = poptorch.inferenceModel(Net(result), poptorch.Options().deviceIterations(2))
    with pytest.raises(TypeError, match=r"models take and return tensors, in tuples.* Received: (Result|float)"):
        model(torch.arange(24.0).reshape(8, 3))
    same = poptorch.inferenceModel(Net(lambda y: (y, 1.5, None, "a")), poptorch.Options().deviceIterations(2))(X)
    assert (same[0].shape, same[1:]) == ((8, 2), (1.5, None, "a"))


@pytest.mark.parametrize("given", [X.numpy(), collections.UserDict(x=X)])
def test_inputs_that_cannot_be_divided_into_micro_batches_are_refused(given: Any) -> None:
    model = poptorch.inferenceModel(Net(), poptorch.Options().deviceIterations(2))
    with pytest.raises(TypeError, match=r"Received: (ndarray|UserDict)"):
        model(given)
