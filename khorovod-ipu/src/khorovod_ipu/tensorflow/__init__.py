"""The SDK's TensorFlow for data-parallel training, on top of a current TensorFlow.

``import khorovod_ipu.tensorflow`` makes ``tensorflow.python.ipu`` importable; installed, ``khorovod_ipu.pth`` does it
when Python starts. This loads nothing.
"""

from __future__ import annotations

import khorovod_ipu_finder
from khorovod_ipu.guard import refuse_beside_the_sdk

__all__: list[str] = []

refuse_beside_the_sdk()
khorovod_ipu_finder.install()
