"""Place of the module for Spark; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.missing import explain

raise ImportError(explain("spark"), name=__name__)
