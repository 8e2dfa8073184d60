"""Strategies for scripts that import ``lightning``.

Importing this module also registers the name ``"horovod"``, so that ``Trainer(strategy="horovod")`` works.
"""

from horovod.bindings.misuse import not_installed

try:
    import lightning as _package  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning", "lightning") from None

from lightning.fabric import strategies as _fabric
from lightning.pytorch import strategies as _trainer

from horovod._lightning import strategies

__all__ = ["HorovodFabricStrategy", "HorovodStrategy"]

HorovodStrategy, HorovodFabricStrategy = strategies(__name__, _trainer, _fabric)
