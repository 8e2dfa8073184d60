"""Place of the module for MXNet; importing it says that it is not there."""

from __future__ import annotations

raise ImportError("horovod.mxnet belongs to MXNet, which is retired: khorovod does not have it", name=__name__)
