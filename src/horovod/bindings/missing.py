"""Names of Horovod that this version does not have, and the feature each of them belongs to.

Each module among them is a file that raises ImportError with the reason, so that scripts that try the import and go on
without it keep working.
"""

from __future__ import annotations

__all__ = ["NOT_PLANNED", "explain"]

#: Name below ``horovod`` to feature.
NOT_PLANNED: dict[str, str] = {
    "mxnet": "MXNet, which is retired",
}


def explain(name: str) -> str:
    """Return what to say to somebody who asks for ``name``, or an empty text.

    Args:
        name: without the leading ``horovod.``.
    """
    if name in NOT_PLANNED:
        return f"horovod.{name} belongs to {NOT_PLANNED[name]}: khorovod does not have it"
    return ""
