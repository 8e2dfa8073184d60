"""Inputs and anchors of one ``session.run()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from popart.enums import AnchorReturnTypeId
from popart.errors import popart_exception, unknown

__all__ = ["AnchorReturnType", "DataFlow", "InputSettings", "InputShapeInfo"]

_IDS = {kind.name.lower(): kind for kind in AnchorReturnTypeId}


class AnchorReturnType:
    """The values of an anchor that a run returns.

    Args:
        artString: ``Final``, ``EveryN``, ``All`` or ``Sum``, in any case.
        returnPeriod: N of ``EveryN``, which returns all micro-batches of every Nth batch.

    Raises:
        popart_exception: the type does not exist, or the period does not fit it.
    """

    def __init__(self, artString: str, returnPeriod: int | None = None, *_: Any) -> None:
        if str(artString).lower() not in _IDS:
            raise popart_exception(f"an anchor returns Final, EveryN, All or Sum; received {artString!r}")
        self._id = _IDS[artString.lower()]
        if self._id is AnchorReturnTypeId.EveryN and (returnPeriod is None or returnPeriod < 1):
            raise popart_exception(f'AnchorReturnType("EveryN", N) needs a period N of at least 1; got {returnPeriod}')
        self._period = returnPeriod or 0

    def id(self) -> AnchorReturnTypeId:
        """Return the type."""
        return self._id

    def rp(self) -> int:
        """Return the period of ``EveryN``.

        Raises:
            popart_exception: the type has no period.
        """
        if self._id is not AnchorReturnTypeId.EveryN:
            raise popart_exception(f"only EveryN has a return period, this is {self._id.name}")
        return self._period

    def __repr__(self) -> str:
        return f"AnchorReturnType({self._id.name!r}{f', {self._period}' if self._period else ''})"


class DataFlow:
    """The number of batches of one ``run()``, and its anchors.

    Args:
        batchesPerStep: optimizer steps, or batches of inference, per ``run()``.
        anchors: the return type by tensor id; or ids, with one type for all.
        returnType: return type for a list of ids.

    Raises:
        popart_exception: the number is not positive, a period does not divide it, or a type is invalid.
    """

    def __init__(
        self,
        batchesPerStep: int,
        anchors: Mapping[str, AnchorReturnType] | Sequence[str] = (),
        returnType: AnchorReturnType | None = None,
    ) -> None:
        if batchesPerStep < 1 or batchesPerStep % 1:
            raise popart_exception(f"batchesPerStep must be a whole number of at least 1; received {batchesPerStep}")
        if isinstance(anchors, Mapping):
            self._anchors = dict(anchors)
        else:
            self._anchors = dict.fromkeys(anchors, returnType or AnchorReturnType("All"))
        for name, kind in self._anchors.items():
            if not isinstance(kind, AnchorReturnType):
                raise popart_exception(f"the anchor {name!r} needs a popart.AnchorReturnType; received {kind!r}")
            if kind.id() is AnchorReturnTypeId.EveryN and batchesPerStep % kind.rp():
                raise popart_exception(
                    f"the anchor {name!r} returns every {kind.rp()}th batch, which must divide the {batchesPerStep} "
                    "batches of a step"
                )
        self._batches = int(batchesPerStep)

    def batchesPerStep(self) -> int:
        """Return the number of batches per ``run()``."""
        return self._batches

    def anchors(self) -> list[str]:
        """Return the ids of all anchors."""
        return list(self._anchors)

    def nAnchors(self) -> int:
        """Return the number of anchors."""
        return len(self._anchors)

    def isAnchored(self, tensorId: str) -> bool:
        """Return whether a tensor is an anchor."""
        return tensorId in self._anchors

    def art(self, tensorId: str) -> AnchorReturnType:
        """Return the return type of an anchor.

        Raises:
            popart_exception: the tensor is not an anchor.
        """
        if tensorId not in self._anchors:
            raise unknown("an anchor of this DataFlow", tensorId, self._anchors)
        return self._anchors[tensorId]


class InputShapeInfo(dict[str, Any]):
    """Shapes of inputs that are unknown in a model, by id."""

    add, has = dict.__setitem__, dict.__contains__


class InputSettings:
    """Memory and transfer of an input: accepted, without effect on the software device."""

    def __init__(self, *settings: Any) -> None:
        self.settings = settings
