"""Names of Horovod that this version does not have yet, and the feature each of them belongs to.

Whoever asks for one is told so, instead of "has no attribute".
"""

from __future__ import annotations

__all__ = ["LATER", "explain"]

_ELASTIC = "elastic jobs, which go on when hosts come and go"

#: Name below ``horovod`` to feature.
LATER: dict[str, str] = {
    "common.elastic": _ELASTIC,
    "torch.elastic": _ELASTIC,
}


def explain(name: str) -> str:
    """Return what to say to somebody who asks for ``name``, or an empty text.

    Args:
        name: without the leading ``horovod.``.
    """
    feature = LATER.get(name)
    if feature is None:
        return ""
    return f"horovod.{name} belongs to {feature}: a later version of khorovod will have it, this one does not"
