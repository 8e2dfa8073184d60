"""Code shared by ``horovod.lightning`` and ``horovod.pytorch_lightning``, whose packages have the same classes twice.

Importing this module lets Lightning look for an MPI job without an error.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

from horovod._lightning.fabric import HorovodFabricStrategy
from horovod._lightning.trainer import HorovodStrategy

__all__ = ["strategies"]

try:  # Lightning asks mpi4py for an MPI job before it creates a strategy from a name, and expects an ImportError
    _ = importlib.util.find_spec("mpi4py.MPI")  # does not start MPI
except ImportError:
    pass
except RuntimeError:  # mpi4py 4.1 without an MPI library
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]


def strategies(module: str, trainer: ModuleType, fabric: ModuleType) -> tuple[Any, Any]:
    """Return the strategies for one of Lightning's packages, and register them there as ``"horovod"``.

    Args:
        module: name of the module that exports them.
        trainer: the package's strategies for ``Trainer``.
        fabric: the package's strategies for ``Fabric``.
    """
    made = []
    for shared, package, registry in (
        (HorovodStrategy, trainer, trainer.StrategyRegistry),
        (HorovodFabricStrategy, fabric, fabric.STRATEGY_REGISTRY),
    ):
        names = {"__module__": module, "__doc__": shared.__doc__}
        made.append(type(shared.__name__, (shared, package.ParallelStrategy), names))
        if "horovod" not in registry:
            registry.register("horovod", made[-1], description="ranks that horovodrun or another launcher has started")
    return made[0], made[1]
