"""Place of the module for Ray; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.missing import explain

raise ImportError(explain("ray"), name=__name__)
