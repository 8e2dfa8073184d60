"""Models in half precision: the optimizer computes in float32, as its state on the device is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from popart_models import session_of, step, weights_of

import popart

RATE = {"defaultLearningRate": (0.01, False)}
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda: popart.SGD({**RATE, "defaultMomentum": (0.9, True), "lossScaling": (128.0, True)}),
    **{mode.name: lambda mode=mode: popart.Adam(RATE, mode=mode) for mode in popart.AdamMode},
    **{mode.name: lambda mode=mode: popart.Adaptive(RATE, mode=mode) for mode in popart.AdaptiveMode},
}
#: Their squares are below the least number of half precision.
INPUTS = np.random.RandomState(0).randn(5, 4, 3) * 0.03


def quadratic(dtype: Any) -> tuple[bytes, str]:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo(dtype, [4, 3]), "x")
    w = builder.addInitializedInputTensor((np.arange(6).reshape(3, 2) / 10 - 0.2).astype(dtype), "w")
    y = builder.aiOnnx.matmul([x, w])
    loss = builder.aiGraphcore.identityloss([builder.aiOnnx.mul([y, y])], reduction=popart.ReductionType.Mean)
    return builder.getModelProto(), loss


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_in_half_precision_follow_those_in_float32(kind: str, tmp_path: Path) -> None:
    found = {}
    for dtype in (np.float16, np.float32):
        session = session_of(quadratic(dtype), None, OPTIMIZERS[kind](), len(INPUTS))
        session.weightsFromHost()
        step(session, {"x": INPUTS.astype(dtype)})
        found[dtype] = weights_of(session)
        session.modelToHost(str(tmp_path / "model.onnx"))
    assert all(array.dtype == np.float32 for name, array in found[np.float16].items() if name != "w")
    np.testing.assert_allclose(found[np.float16]["w"].astype(np.float32), found[np.float32]["w"], atol=2e-3)
