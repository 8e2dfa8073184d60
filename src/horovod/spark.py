"""Place of the module for Spark; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.later import explain

raise ImportError(explain("spark"), name=__name__)
