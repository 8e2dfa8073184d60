"""The models of ``models``, of the same sizes, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from horovod.bench.cases import MODELS

__all__ = ["JaxTask", "make_task"]

_CLASSES = 1000


@dataclass
class JaxTask:
    """A model with one batch of data.

    Attributes:
        params: the same on every rank.
        logits: ``logits(params, inputs)``.
        inputs: one batch.
        targets: class of each row of logits.
    """

    params: Any
    logits: Callable[[Any, Any], Any]
    inputs: Any
    targets: Any

    def loss(self, params: Any, inputs: Any, targets: Any) -> Any:
        """Cross entropy."""
        logits = self.logits(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class _Drawer:
    """Draws parameters, the same on every rank."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(0)

    def __call__(self, *shape: int) -> Any:
        fan_in = int(np.prod(shape[:-1]))
        return jnp.asarray(self._draw.normal(size=shape) / np.sqrt(fan_in), jnp.float32)


def _mlp_logits(params: Any, x: Any) -> Any:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def _mlp(tiny: bool, new: _Drawer) -> Any:
    widths = [*([16, 32, 32] if tiny else [1024, *[2048] * 6]), _CLASSES]
    return [{"kernel": new(before, after), "bias": jnp.zeros(after)} for before, after in pairwise(widths)]


def _convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _normalize(x: Any, scale: Any, axes: tuple[int, ...]) -> Any:
    centred = x - x.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-5) * scale["w"] + scale["b"]


def _scale(width: int) -> Any:
    return {"w": jnp.ones(width), "b": jnp.zeros(width)}


def _resnet(tiny: bool, new: _Drawer) -> Any:
    width = 4 if tiny else 64
    params: Any = {"stem": new(3, 3, 3, width), "norm": _scale(width), "blocks": []}
    for before, after in [(1, 1), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4)]:
        block = {
            "conv1": new(3, 3, before * width, after * width), "norm1": _scale(after * width),
            "conv2": new(3, 3, after * width, after * width), "norm2": _scale(after * width),
        }  # fmt: skip
        if before != after:
            block["short"] = new(1, 1, before * width, after * width)
        params["blocks"].append(block)
    return {**params, "head": {"kernel": new(4 * width, _CLASSES), "bias": jnp.zeros(_CLASSES)}}


def _resnet_logits(params: Any, x: Any) -> Any:
    over = (0, 1, 2)
    x = jax.nn.relu(_normalize(_convolve(x, params["stem"]), params["norm"], over))
    for block in params["blocks"]:
        stride = 2 if "short" in block else 1
        y = jax.nn.relu(_normalize(_convolve(x, block["conv1"], stride), block["norm1"], over))
        y = _normalize(_convolve(y, block["conv2"]), block["norm2"], over)
        x = jax.nn.relu(y + (_convolve(x, block["short"], stride) if "short" in block else x))
    return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]


def _gpt(vocabulary: int, length: int, width: int, depth: int, new: _Drawer) -> Any:
    blocks = [
        {
            "norm1": _scale(width), "norm2": _scale(width), "qkv": new(width, 3 * width), "out": new(width, width),
            "up": new(width, 4 * width), "down": new(4 * width, width),
        }
        for _ in range(depth)
    ]  # fmt: skip
    return {
        "tokens": new(vocabulary, width), "places": new(length, width), "blocks": blocks, "norm": _scale(width),
        "head": new(width, vocabulary),
    }  # fmt: skip


def _gpt_logits(params: Any, text: Any) -> Any:
    x = params["tokens"][text] + params["places"]
    rows, length, width = x.shape
    heads = max(1, width // 64)
    for block in params["blocks"]:
        qkv = _normalize(x, block["norm1"], (-1,)) @ block["qkv"]
        q, k, v = jnp.moveaxis(qkv.reshape(rows, length, 3, heads, width // heads), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(rows, length, width) @ block["out"]
        x = x + jax.nn.gelu(_normalize(x, block["norm2"], (-1,)) @ block["up"]) @ block["down"]
    return _normalize(x, params["norm"], (-1,)) @ params["head"]


def make_task(name: str, rank: int, *, tiny: bool = False) -> JaxTask:
    """Make a model, the same on every rank, and a batch, different on every rank.

    Args:
        name: one of ``MODELS``.
        rank: picks the data.
        tiny: a few thousand parameters instead of millions, to see that it runs.

    Raises:
        ValueError: no such model.
    """
    draw, new = np.random.default_rng(1000 + rank), _Drawer()
    if name == "mlp":
        rows, width = (4, 16) if tiny else (64, 1024)
        inputs = draw.normal(size=(rows, width)).astype(np.float32)
        return JaxTask(_mlp(tiny, new), _mlp_logits, inputs, draw.integers(_CLASSES, size=rows))
    if name == "resnet":
        rows = 2 if tiny else 16
        inputs = draw.normal(size=(rows, 32, 32, 3)).astype(np.float32)
        return JaxTask(_resnet(tiny, new), _resnet_logits, inputs, draw.integers(_CLASSES, size=rows))
    if name == "gpt":
        vocabulary, length, width, depth, rows = (64, 8, 16, 2, 2) if tiny else (8192, 128, 384, 6, 4)
        text = draw.integers(vocabulary, size=(rows, length + 1))
        return JaxTask(_gpt(vocabulary, length, width, depth, new), _gpt_logits, text[:, :-1], text[:, 1:])
    raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
