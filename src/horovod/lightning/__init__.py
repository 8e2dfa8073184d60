"""Lightning on Horovod's ranks: ``Trainer(strategy=HorovodStrategy())``, and the same for Fabric.

Importing this module also registers the name ``"horovod"``, so that ``Trainer(strategy="horovod")`` works.
"""

import importlib.util
import sys

from horovod.bindings.misuse import not_installed

try:
    import lightning as _lightning  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning", "lightning") from None

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from horovod.lightning.fabric import HorovodFabricStrategy
from horovod.lightning.trainer import HorovodStrategy

__all__ = ["HorovodFabricStrategy", "HorovodStrategy"]

try:  # Lightning asks mpi4py for an MPI job before it creates a strategy from a name, and expects an ImportError
    _ = importlib.util.find_spec("mpi4py.MPI")  # does not start MPI
except ImportError:
    pass
except RuntimeError:  # mpi4py 4.1 without an MPI library
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]

for _registry, _strategy in ((StrategyRegistry, HorovodStrategy), (STRATEGY_REGISTRY, HorovodFabricStrategy)):
    if "horovod" not in _registry:
        _registry.register("horovod", _strategy, description="ranks that horovodrun or another launcher has started")
