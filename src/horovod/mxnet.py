"""Place of the module for MXNet; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.missing import explain

raise ImportError(explain("mxnet"), name=__name__)
