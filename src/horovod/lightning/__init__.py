"""Lightning on Horovod's ranks: ``Trainer(strategy=HorovodStrategy())``, and the same for Fabric.

Importing this module also registers the name ``"horovod"``, so that ``Trainer(strategy="horovod")`` works.
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from horovod.lightning.fabric import HorovodFabricStrategy
from horovod.lightning.trainer import HorovodStrategy

__all__ = ["HorovodFabricStrategy", "HorovodStrategy"]

for _registry, _strategy in ((StrategyRegistry, HorovodStrategy), (STRATEGY_REGISTRY, HorovodFabricStrategy)):
    if "horovod" not in _registry:
        _registry.register("horovod", _strategy, description="ranks that horovodrun or another launcher has started")
