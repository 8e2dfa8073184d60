"""Place of Horovod's module of this name; importing it says that it is not there, and what is instead."""

from __future__ import annotations

from horovod.bindings.later import explain

raise ImportError(explain("runner.common.util.codec"), name=__name__)
