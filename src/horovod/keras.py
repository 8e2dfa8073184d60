"""Place of the module for Keras; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.later import explain

raise ImportError(explain("keras"), name=__name__)
