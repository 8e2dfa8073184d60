"""Strategies for scripts that import ``pytorch_lightning``.

Importing this module also registers the name ``"horovod"``, so that ``Trainer(strategy="horovod")`` works.
"""

from horovod.bindings.misuse import not_installed

try:
    import pytorch_lightning
except ModuleNotFoundError as error:
    raise not_installed(error, "pytorch_lightning") from None

import lightning_fabric

from horovod._lightning import strategies

__all__ = ["HorovodFabricStrategy", "HorovodStrategy"]

HorovodStrategy, HorovodFabricStrategy = strategies(__name__, pytorch_lightning, lightning_fabric)
