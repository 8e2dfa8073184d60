"""``tensorflow.python.ipu`` in software: names of the SDK, implemented in ``khorovod_ipu.tensorflow``."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from khorovod_ipu.tensorflow import settings, software

__all__ = [
    "config", "distributed", "horovod", "ipu_compiler", "ipu_estimator", "ipu_infeed_queue",
    "ipu_multi_worker_strategy", "ipu_outfeed_queue", "ipu_run_config", "ipu_strategy", "keras", "loops", "ops",
    "pipelining_ops", "scopes", "utils",
]  # fmt: skip

_HERE = "khorovod_ipu.tensorflow"
_PIPELINES = {f"{_HERE}.programs": "OptimizerFunctionOutput PipelineSchedule RecomputationMode pipeline"}
_POPDIST = {f"{_HERE}.strategies": "IPUMultiReplicaStrategy PopDistStrategy"}
#: Submodules, and the modules that define their names: by module, `name` or `name=its_name_there`.
_MODULES: dict[str, dict[str, str]] = {
    "config": {f"{_HERE}.options": "IPUConfig"},
    "distributed": {f"{_HERE}.instances": "allgather allreduce broadcast"},
    "distributed.popdist_strategy": _POPDIST,
    "horovod": {
        f"{_HERE}.hvd": "allreduce",
        "horovod.tensorflow": "Adasum Average Sum allgather broadcast ddl_built gloo_built gloo_enabled init "
        "is_homogeneous local_rank local_size mpi_built mpi_enabled nccl_built rank shutdown size",
    },
    "horovod.ipu_horovod_strategy": {
        f"{_HERE}.strategies": "IPUHorovodStrategy IPUHorovodStrategyV1=IPUHorovodStrategy"
    },
    "horovod.ipu_multi_replica_strategy": _POPDIST,
    "horovod.popdist_strategy": _POPDIST,
    "ipu_compiler": {f"{_HERE}.programs": "compile=compiled"},
    "ipu_estimator": {f"{_HERE}.estimator": "IPUEstimator IPUEstimatorSpec"},
    "ipu_infeed_queue": {f"{_HERE}.queues": "IPUInfeedQueue IPUIterator"},
    "ipu_multi_worker_strategy": {
        f"{_HERE}.strategies": "IPUMultiWorkerStrategy IPUMultiWorkerStrategyV1=IPUMultiWorkerStrategy"
    },
    "ipu_outfeed_queue": {f"{_HERE}.queues": "IPUOutfeedMode IPUOutfeedQueue"},
    "ipu_run_config": {f"{_HERE}.estimator": "IPURunConfig RunConfig"},
    "ipu_strategy": {f"{_HERE}.strategies": "IPUStrategy IPUStrategyV1=IPUStrategy"},
    "keras": {"tensorflow.keras": "Model Sequential"},
    "loops": {f"{_HERE}.programs": "repeat"},
    "ops": {},
    "ops.pipelining_ops": _PIPELINES,
    "pipelining_ops": _PIPELINES,
    "scopes": {"tensorflow": "ipu_scope=device", f"{_HERE}.settings": "ipu_shard outside_compilation_scope"},
    "utils": {f"{_HERE}.settings": " ".join((*settings.UTILITIES, *settings.SETTERS))},
}


class _Module(ModuleType):
    """A module that imports its names on first access.

    Args:
        name: name of the module within this package.
        places: as in ``_MODULES``.
    """

    def __init__(self, name: str, places: dict[str, str]) -> None:
        super().__init__(f"{__name__}.{name}", f"Names of the SDK's ``ipu.{name}``.")
        self.__path__: list[str] = []
        self._places: dict[str, tuple[str, str]] = {}
        for module, names in places.items():
            for entry in names.split():
                own, _, there = entry.partition("=")
                self._places[own] = (module, there or own)
        self.__all__ = list(self._places)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._places:
            raise settings.missing(self.__name__, name)
        module, there = self._places[name]
        value = getattr(importlib.import_module(module), there)
        setattr(self, name, value)
        return value


def __getattr__(name: str) -> Any:
    raise settings.missing(__name__, name)


software.prepare()
for _name, _places in _MODULES.items():
    _made = sys.modules[f"{__name__}.{_name}"] = _Module(_name, _places)
    _parent, _, _own = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _own, _made)
