"""``horovod.popart`` with sessions that are not ours: it knows them by their methods, and imports no PopART."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from commands import run
from harness import on_ranks

PROBE = """
import json, sys
import horovod.popart as hvd
hvd.init()
print(json.dumps([sorted({m.partition(".")[0] for m in sys.modules}), hvd.rank(), hvd.size(), hvd.local_size()]))
hvd.shutdown()
"""


def test_it_imports_neither_popart_nor_a_framework() -> None:
    code, output = run(["python", "-c", PROBE], cwd=Path("/"))
    assert code == 0, output
    loaded, *numbers = json.loads(output.splitlines()[-1])
    assert not set(loaded) & {"popart", "onnx", "torch", "tensorflow", "jax", "keras", "khorovod_ipu"}
    assert numbers == [0, 1, 1]


def vendor() -> Any:
    """A package such as the vendor's: a session class whose module has ``PyWeightsIO``, and capsules for pointers."""
    module: Any = ModuleType("vendors_popart")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    class PyWeightsIO:
        def __init__(self, weights: dict[str, Any]) -> None:
            self.held = weights

    class Info:
        def shape(self) -> list[int]:
            return [2, 3]

        def data_type_lcase(self) -> str:
            return "float32"

    class Session:
        """Two weights, whose streams are listed in any order."""

        def __init__(self, load: str, start: float) -> None:
            self.host = {name: np.full((2, 3), start, np.float32) for name in ("u", "v")}
            self.device: dict[str, Any] = {}
            self.load, self.callbacks = load, {}

        def getHostReduceStreamIds(self) -> list[str]:
            prefix = "" if self.load == "weightLoad__" else "FinalReducedGradient___"
            return ["gradientStore__FinalReducedGradient___v", f"{self.load}{prefix}u", f"{self.load}{prefix}v",
                    "gradientStore__FinalReducedGradient___u"]  # fmt: skip

        def connectStreamToCallback(self, handle: str, callback: Any, index: int) -> None:
            self.callbacks[handle, index] = callback

        def getInfo(self, name: str) -> Info:
            assert name in self.host
            return Info()

        def readWeights(self, weights: Any) -> None:
            assert isinstance(weights, PyWeightsIO)
            for name, array in weights.held.items():
                np.copyto(array, self.host[name])

        def writeWeights(self, weights: Any) -> None:
            self.host.update({name: array.copy() for name, array in weights.held.items()})

        def weightsFromHost(self) -> None:
            self.device = {name: array.copy() for name, array in self.host.items()}

        def updateOptimizerFromHost(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, gradients: dict[str, float], replicas: int) -> dict[str, Any]:
            """Stores on the way, then loads in the opposite order."""
            for name, value in gradients.items():
                array = np.full((2, 3), value, np.float32)
                for replica in range(replicas):
                    handle = f"gradientStore__FinalReducedGradient___{name}"
                    self.callbacks[handle, replica](capsule(array.ctypes.data, None, None))
            loaded = {}
            for name in reversed(list(gradients)):
                array = np.zeros((2, 3), np.float32)
                prefix = "" if self.load == "weightLoad__" else "FinalReducedGradient___"
                self.callbacks[f"{self.load}{prefix}{name}", 0](capsule(array.ctypes.data, None, None))
                loaded[name] = array
            return loaded

    for kind in (PyWeightsIO, Session):
        kind.__module__ = module.__name__
        setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module
    return module


class Options:
    hostAllReduce = True
    enableReplicatedGraphs = True
    replicatedGraphCount = 2


class Value:
    def __init__(self, value: float) -> None:
        self.value = value

    def val(self) -> float:
        return self.value

    def get(self, weight: str) -> Value:
        return self


class Optimizer:
    """SGD with a rate of 0.5, a decay of 0.1, no dampening, and losses scaled by 4."""

    def learningRates(self) -> Value:
        return Value(0.5)

    def weightDecays(self) -> Value:
        return Value(0.1)

    def dampenings(self) -> Value:
        return Value(0.0)

    def getLossScalingVal(self) -> float:
        return 4.0


@on_ranks(2)
def test_gradients_of_a_foreign_session_are_averaged_by_name_whatever_the_order() -> None:
    import horovod.popart as hvd

    session = vendor().Session("gradientLoad__", hvd.rank())
    hvd.DistributedOptimizer(None, session, Options()).insert_host_allreduce()
    found = []
    for turn in range(3):
        # Each rank has its own order; gradients meet by their ids.
        order = ("u", "v") if (hvd.rank() + turn) % 2 else ("v", "u")
        mine = {"u": 1.0 + hvd.rank() + turn, "v": 10.0 * (hvd.rank() + 1)}
        loaded = session.step({name: mine[name] for name in order}, replicas=2)
        found.append({name: float(array.mean()) for name, array in loaded.items()})
    hvd.broadcast_weights(session, root_rank=1)
    assert (session.host["u"] == 1).all() and (session.host["v"] == 1).all()
    assert found == [{"u": 1.5 + turn, "v": 15.0} for turn in range(3)]


@on_ranks(2)
def test_weights_are_updated_on_the_host_and_read_again_after_an_upload() -> None:
    import horovod.popart as hvd

    session = vendor().Session("weightLoad__", 2.0)
    hvd.DistributedOptimizer(Optimizer(), session, Options()).insert_host_allreduce()
    session.weightsFromHost()
    values = [float(session.step({"u": 4.0 * hvd.rank(), "v": 0.0}, 2)["u"][0, 0]) for _ in range(2)]
    session.host["u"][...] = 100.0  # as writeWeights() would
    session.weightsFromHost()
    first = 2.0 * 0.95 - 0.5 / 4 * 2.0
    second = first * 0.95 - 0.5 / 4 * 2.0
    values = [*values, float(session.step({"u": 0.0, "v": 0.0}, 2)["u"][0, 0])]
    assert values == pytest.approx([first, second, 95.0], rel=1e-6)


@on_ranks(1, init=False)
def test_sessions_that_are_odd_are_told_apart() -> None:
    import horovod.popart as hvd

    hvd.init()
    module = vendor()
    strange = module.Session("gradientLoad__", 0.0)
    strange.getHostReduceStreamIds = lambda: ["somethingElse__u"]
    with pytest.raises(ValueError, match="unknown stream of host reduction: 'somethingElse__u'"):
        hvd.DistributedOptimizer(None, strange, Options()).insert_host_allreduce()
    strange.getHostReduceStreamIds = lambda: ["gradientStore__Gradient___u"]
    with pytest.raises(ValueError, match="Missing for: u"):
        hvd.DistributedOptimizer(None, strange, Options()).insert_host_allreduce()
    strange.getHostReduceStreamIds = list
    with pytest.raises(ValueError, match="broadcast_weights finds no weights"):
        hvd.broadcast_weights(strange)

    class NotOfPopart:
        getHostReduceStreamIds, getInfo = module.Session.getHostReduceStreamIds, module.Session.getInfo
        host, load, readWeights = {"u": 0, "v": 0}, "gradientLoad__", print

    with pytest.raises(ValueError, match=r"expected an object of PopART\. Received: NotOfPopart"):
        hvd.broadcast_weights(NotOfPopart())
    early = module.Session("gradientLoad__", 0.0)
    hvd.DistributedOptimizer(None, early, Options()).insert_host_allreduce()
    with pytest.raises(RuntimeError, match="was loaded before it was stored"):
        early.callbacks["gradientLoad__FinalReducedGradient___u", 0](0)
