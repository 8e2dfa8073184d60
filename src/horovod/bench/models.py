"""Three small models that stress communication differently, each with generated data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from horovod.bench.cases import MODELS

__all__ = ["Task", "make_task"]

_CLASSES = 1000


@dataclass
class Task:
    """A model with one batch of data."""

    model: nn.Module  # maps `inputs` to logits
    inputs: Tensor  # one batch
    targets: Tensor  # class of each row of logits

    def loss(self, model: nn.Module) -> Tensor:
        """Return the cross entropy of ``model``, which may wrap this task's model."""
        logits = model(self.inputs)
        return functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())


def _mlp(tiny: bool) -> nn.Module:
    """Make 25 million parameters in seven layers: few large gradients, little arithmetic to hide them."""
    widths = [16, 32, 32] if tiny else [1024, *[2048] * 6]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], _CLASSES))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        plain = before == after and stride == 1
        self.short = nn.Identity() if plain else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


def _resnet(tiny: bool) -> nn.Module:
    """Make a residual network for 32 × 32 pictures, 3 million parameters: much arithmetic, many small gradients."""
    width = 4 if tiny else 64
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage, (before, after) in enumerate([(1, 1), (1, 2), (2, 4)]):
        blocks.append(_Residual(before * width, after * width, 1 if stage == 0 else 2))
        blocks.append(_Residual(after * width, after * width, 1))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, _CLASSES))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        after: Tensor = x + self.mlp(self.norm2(x))
        return after


class _Gpt(nn.Module):
    """A decoder, 17 million parameters: a large embedding gradient that comes last."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[_Attention(width, max(1, width // 64)) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return logits


def make_task(name: str, rank: int, *, tiny: bool = False) -> Task:
    """Make a model, the same on every rank, and a batch, different on every rank. ``tiny``: a few thousand parameters
    instead of millions, for a test.

    Raises:
        ValueError: no such model.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "mlp":
            rows = 4 if tiny else 64
            inputs = torch.randn(rows, 16 if tiny else 1024, generator=generator)
            return Task(_mlp(tiny), inputs, torch.randint(_CLASSES, (rows,), generator=generator))
        if name == "resnet":
            rows = 2 if tiny else 16
            inputs = torch.randn(rows, 3, 32, 32, generator=generator)
            return Task(_resnet(tiny), inputs, torch.randint(_CLASSES, (rows,), generator=generator))
        if name == "gpt":
            vocabulary, length, width, depth, rows = (64, 8, 16, 2, 2) if tiny else (8192, 128, 384, 6, 4)
            text = torch.randint(vocabulary, (rows, length + 1), generator=generator)
            return Task(_Gpt(vocabulary, length, width, depth), text[:, :-1], text[:, 1:])
    raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
