"""Assignment of gradients to buckets: pure planning, no tensor is touched here.

A bucket is one flat buffer of one dtype on one device. Gradients lie in it in the order in which backward
produces them, each on a 64-byte boundary; one *presence flag* per gradient follows them. The flags
are reduced with the data, so that after the reduction every rank knows whether any rank had that gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BucketLayout", "Item", "plan_buckets"]

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Item:
    """Properties of a gradient that the planner needs."""

    index: int  # the caller's number of the gradient
    count: int  # number of elements
    itemsize: int  # bytes per element
    kind: Hashable  # dtype and device; items of one kind may share a buffer


@dataclass(frozen=True)
class BucketLayout:
    """Positions of gradients and flags in one bucket; all numbers except ``indexes`` count elements."""

    indexes: tuple[int, ...]  # indexes of its items, in order
    offsets: tuple[int, ...]  # start of each item
    flags: int  # start of the presence flags
    count: int  # length of the buffer, which ends with the flags


def plan_buckets(
    items: Sequence[Item], bucket_bytes: int, groups: Iterable[Sequence[int]] = (), shards: int = 1
) -> tuple[BucketLayout, ...]:
    """Assign ``items`` to buckets, in the order in which their gradients become ready: that of the last items.

    An item larger than ``bucket_bytes`` gets a bucket of its own. Each group shares a bucket of any size, or one per
    kind; indexes without an item are ignored. The part before the flags divides into so many ``shards``, equal runs
    that each begin on a 64-byte boundary.
    """
    place = {item.index: position for position, item in enumerate(items)}
    buckets: list[list[Item]] = []
    grouped: set[int] = set()
    for group in groups:
        by_kind: dict[Hashable, list[Item]] = {}
        for position in sorted(place[index] for index in group if index in place):
            by_kind.setdefault(items[position].kind, []).append(items[position])
        buckets.extend(by_kind.values())
        grouped.update(group)
    open_buckets: dict[Hashable, tuple[list[Item], int]] = {}
    for item in items:
        if item.index in grouped:
            continue
        members, used = open_buckets.get(item.kind, ([], 0))
        nbytes = _padded(item.count, item.itemsize) * item.itemsize
        if not members or used + nbytes > bucket_bytes:
            members, used = [], 0
            buckets.append(members)
        members.append(item)
        open_buckets[item.kind] = (members, used + nbytes)
    buckets.sort(key=lambda members: place[members[-1].index])
    return tuple(_lay_out(members, shards) for members in buckets)


def _padded(count: int, itemsize: int, shards: int = 1) -> int:
    step = max(1, _ALIGN_BYTES // itemsize) * shards
    return -(-count // step) * step


def _lay_out(members: Sequence[Item], shards: int) -> BucketLayout:
    offsets, end = [], 0
    for item in members:
        offsets.append(end)
        end += _padded(item.count, item.itemsize)
    end = _padded(end, members[0].itemsize, shards)
    return BucketLayout(tuple(item.index for item in members), tuple(offsets), end, end + len(members))
