"""Horovod's class ``HorovodBasics``: functions that need no framework, and private names that other code calls."""

from __future__ import annotations

from typing import ClassVar

from horovod.bindings.job import JobFunctions
from horovod.bindings.process_sets import not_a_member, process_set_ids_and_ranks
from horovod.core.requests import ReduceOp

__all__ = ["HorovodBasics"]


class HorovodBasics(JobFunctions):
    """Implements Horovod's class of the same name.

    Args:
        pkg_path: accepted and ignored: there is no library to load.
        *args: accepted and ignored.
    """

    Average: ClassVar[int] = ReduceOp.AVERAGE
    Sum: ClassVar[int] = ReduceOp.SUM
    Adasum: ClassVar[int] = ReduceOp.ADASUM
    Min: ClassVar[int] = ReduceOp.MIN
    Max: ClassVar[int] = ReduceOp.MAX
    Product: ClassVar[int] = ReduceOp.PRODUCT

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        del pkg_path, args

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return process_set_ids_and_ranks()

    def _process_set_size(self, process_set_id: int) -> int:
        return len(_members(process_set_id))

    def _process_set_rank(self, process_set_id: int) -> int:
        members, rank = _members(process_set_id), self.rank()
        if rank not in members:
            raise not_a_member(rank, members)
        return members.index(rank)


def _members(process_set_id: int) -> list[int]:
    members = process_set_ids_and_ranks().get(process_set_id)
    if members is None:
        raise ValueError(f"there is no process set {process_set_id}")
    return members
