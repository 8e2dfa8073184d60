"""Adasum: the coefficients against the published formula, and real ranks against both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import on_ranks

from horovod.core.adasum import coefficients


def reference(vectors: list[Any]) -> Any:
    """The published formula, in a binary tree, in float64."""
    level = [vector.astype(np.float64) for vector in vectors]
    while len(level) > 1:
        pairs = []
        for a, b in zip(level[::2], level[1::2], strict=False):
            dot, aa, bb = a @ b, a @ a, b @ b
            pairs.append((1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b)
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0]


def _vectors(count: int, length: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return list(rng.normal(size=(count, length)) + rng.normal(size=length))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16])
def test_coefficients(count: int) -> None:
    vectors = _vectors(count, 50)
    matrix = np.stack(vectors)
    weights = coefficients((matrix @ matrix.T).tolist())
    np.testing.assert_allclose(np.array(weights) @ matrix, reference(vectors), rtol=1e-11)


def test_equal_vectors_are_averaged_and_orthogonal_ones_added() -> None:
    assert coefficients([[4.0, 4.0], [4.0, 4.0]]) == [0.5, 0.5]
    assert coefficients([[4.0, 0.0], [0.0, 9.0]]) == [1.0, 1.0]


def test_zero_counts_for_nothing() -> None:
    assert coefficients([[0.0, 0.0], [0.0, 9.0]]) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("library", "dtype"), [("torch", "float64"), ("torch", "float32"), ("torch", "bfloat16"), ("numpy", "float64")]
)
@on_ranks()
def test_ranks(library: str, dtype: str) -> None:
    import torch

    from horovod.bindings.collectives import Collectives
    from horovod.bindings.numpy_adapter import NumpyAdapter
    from horovod.bindings.reductions import Adasum
    from horovod.torch.adapter import TorchAdapter

    hvd = Collectives(TorchAdapter() if library == "torch" else NumpyAdapter())
    size, tolerance = hvd.size(), {"float64": 1e-10, "float32": 1e-4}.get(dtype, 2e-2)
    for length in (3, 300_001):
        vectors = _vectors(size, length)
        if library == "torch":
            rounded = [torch.from_numpy(vector).to(getattr(torch, dtype)) for vector in vectors]
            exact = [vector.double().numpy() for vector in rounded]
        else:
            rounded = [vector.astype(dtype) for vector in vectors]
            exact = rounded
        mine = rounded[hvd.rank()]
        for result in (hvd.allreduce(mine, op=Adasum), hvd.grouped_allreduce([mine, mine], op=Adasum)[1]):
            got = result.double().numpy() if library == "torch" else result
            np.testing.assert_allclose(got, reference(exact), rtol=tolerance, atol=tolerance)
        assert hvd.allgather(result.reshape(1, -1))[:, :3].tolist() == [result[:3].tolist()] * size
