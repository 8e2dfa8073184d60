"""The only ``Collectives`` of torch in this process; every module of ``horovod.torch`` uses it."""

from __future__ import annotations

from horovod.bindings.collectives import Collectives
from horovod.torch.adapter import TorchAdapter

__all__ = ["comm"]

comm = Collectives(TorchAdapter())
