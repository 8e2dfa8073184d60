"""Place of the module for Ray; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.later import explain

raise ImportError(explain("ray"), name=__name__)
