"""The only ``Collectives`` of torch in this process; every module of ``horovod.torch`` uses it."""

from horovod.bindings.collectives import Collectives
from horovod.torch.adapter import TorchAdapter

__all__ = ["comm"]

comm = Collectives(TorchAdapter())
