"""Code of ``horovod.lightning`` and ``horovod.pytorch_lightning``, whose packages have the same classes twice."""

import importlib.util
from types import ModuleType
from typing import Any

from horovod._lightning.fabric import HorovodFabricStrategy
from horovod._lightning.ranks import Environment
from horovod._lightning.trainer import HorovodStrategy

__all__ = ["strategies"]


def strategies(module: str, trainer: ModuleType, fabric: ModuleType) -> tuple[Any, Any]:
    """Return the strategies for one of Lightning's packages, and register them there as ``"horovod"``.

    Args:
        module: name of the module that exports them.
        trainer: the package with ``Trainer``.
        fabric: the package's Fabric.
    """
    environments = fabric.plugins.environments
    environments.ClusterEnvironment.register(Environment)  # else Lightning looks for another one
    try:
        _ = importlib.util.find_spec("mpi4py.MPI")  # does not start MPI
    except ImportError:
        pass
    except RuntimeError:  # mpi4py 4.1 without an MPI library: Lightning expects none of its errors
        environments.MPIEnvironment.detect = staticmethod(lambda: False)
    made = []
    for shared, package, registry in (
        (HorovodStrategy, trainer.strategies, trainer.strategies.StrategyRegistry),
        (HorovodFabricStrategy, fabric.strategies, fabric.strategies.STRATEGY_REGISTRY),
    ):
        names = {"__module__": module, "__doc__": shared.__doc__}
        made.append(type(shared.__name__, (shared, package.ParallelStrategy), names))
        if "horovod" not in registry:
            registry.register("horovod", made[-1], description="ranks that horovodrun or another launcher has started")
    return made[0], made[1]
