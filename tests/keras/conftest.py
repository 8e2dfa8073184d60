"""The backends of Keras, one after the other, so that each set of ranks serves all tests of its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import run_ranks

BACKENDS = ("tensorflow", "torch", "jax")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend."""
    return request.param


@pytest.fixture(scope="session", params=[*(f"keras-{name}" for name in BACKENDS), "tf_keras"])
def framework(request: pytest.FixtureRequest) -> str:
    """The name of the Keras that ranks have loaded: Keras 3 with a backend, or tf_keras."""
    return request.param


@pytest.fixture
def ranks(backend: str) -> Callable[..., list[Any]]:
    """Runs a function on two ranks that have Keras with this backend loaded."""

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(2, function, *args, framework=f"keras-{backend}")

    return run
