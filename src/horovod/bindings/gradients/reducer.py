"""Reduces gradients while backward still runs.

Each parameter has a hook that runs when its gradient is accumulated. In the first step the hooks only record
facts; ``synchronize`` then exchanges them (the *survey*): which parameters have a gradient on any rank, dense
or sparse, and in which order the gradients came. All ranks plan the same buckets from the same survey. From
the second step on, a hook moves the gradient into its bucket, and the last hook of a bucket starts its
allreduce. Parameters without a gradient on any rank stay outside buckets, cost no memory, and are surveyed
again in each step.

No rank can wait for ever: ``synchronize`` submits every agreed bucket on every rank, with zeros and a presence
flag for each missing gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horovod import context
from horovod.bindings.gradients.adapter import GradientAdapter, GradSlot
from horovod.bindings.gradients.buckets import Bucket
from horovod.bindings.gradients.collective import Allreduce, BucketCollective, CompressedAllreduce
from horovod.bindings.gradients.layout import Item, plan_buckets
from horovod.bindings.gradients.names import PREFIX
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.gradients.survey import survey
from horovod.bindings.misuse import changed_gradient, out_of_turn, wrong_argument
from horovod.bindings.process_sets import not_registered
from horovod.engine import callsite
from horovod.errors import HorovodInternalError
from horovod.logs import logger

__all__ = ["Reducer"]


#: How many reducers a process set has had since each ``init()``: a number for their names, equal on all members.
_count: Counter[tuple[int, int | None]] = Counter()


class Reducer:
    """Reduces gradients over a process set, in buckets; every rank has the same parameters.

    The gradients of a group travel together; other buckets have ``bucket_bytes``. By default every rank gets all
    reduced gradients.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Any]],
        settings: ReduceSettings,
        passes: int,
        groups: Sequence[Sequence[Any]],
        bucket_bytes: int,
        adapter: GradientAdapter,
        collective: BucketCollective | None = None,
    ) -> None:
        self.settings = settings
        self._adapter = adapter
        self._collective = collective or _allreduce(adapter, settings)
        self.passes = passes  # backward passes per step
        self._fresh = True
        self._left_with: list[int] = []  # ids of the gradients at the last `synchronize` of a rank that works alone
        self._kept: Any = None  # the smallest of those gradients
        self.slots: dict[int, GradSlot] = {}
        self._groups = [[id(parameter) for parameter in group] for group in groups]
        self._bucket_bytes = bucket_bytes
        self._generation = self._joins = -1
        self.active = False  # whether this rank is a member of a process set with other ranks
        self._name = ""
        self._arrivals = 0
        self._lost = ""
        self.buckets: list[Bucket] = []  # buckets that the ranks have agreed on
        self._unbucketed: list[GradSlot] = []
        self._undecided: list[GradSlot] = []
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _dismantle, self.slots, self._hooks).atexit = False
        self.follow_job()
        self.enroll(named)

    @property
    def fresh(self) -> bool:
        """Whether no gradient came since the last ``synchronize``."""
        if self.active:
            return self._fresh
        # A rank that works alone has no hooks, so compare ids.
        now = (id(self._adapter.gradient(slot.parameter)) for slot in self.slots.values())
        return all(left == came for left, came in zip(self._left_with, now, strict=False))

    @property
    def is_stale(self) -> bool:
        """Whether the membership was renewed after the last gradient came; old gradients no longer count."""
        return self._generation != context.init_count()

    @property
    def has_unbucketed(self) -> bool:
        """Whether there are gradients outside buckets: sparse ones, and those that a stateless compressor packs."""
        return bool(self._unbucketed)

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not yet waited for."""
        return any(bucket.in_flight for bucket in self.buckets) or any(slot.pending for slot in self._unbucketed)

    def enroll(self, named: Iterable[tuple[str, Any]]) -> None:
        """Add parameters; ignore known ones."""
        for name, parameter in named:
            if id(parameter) in self.slots:
                continue
            slot = self.slots[id(parameter)] = GradSlot(parameter, name, self.passes)
            if self.active:
                self._undecided.append(slot)
                self._hook(slot)

    def follow_job(self) -> None:
        """Forget earlier buckets after ``shutdown()`` and ``init()``, and after ``join()``."""
        generation = context.init_count()
        if generation == self._generation:
            if self._joins != context.join_count():
                # A rank that had joined missed the agreement of the others, so all ranks agree again.
                self._joins = context.join_count()
                self.drain()
                self._start_over()
            return
        self._generation, self._joins = generation, context.join_count()
        process_set = self.settings.process_set
        size = process_set.size()
        if size is None:
            raise wrong_argument(not_registered(process_set))
        self.active = bool(process_set.included()) and size > 1
        if self.active:
            key = generation, process_set.process_set_id
            _count[key] += 1
            self._name = PREFIX if _count[key] == 1 else f"{PREFIX}#{_count[key]}"
        self._start_over()

    def _start_over(self) -> None:
        self.buckets, self._unbucketed, self._undecided = [], [], []
        self._arrivals = 0
        for slot in self.slots.values():
            slot.reset(self.passes)
            if self.active:
                self._undecided.append(slot)
                self._hook(slot)

    def _hook(self, slot: GradSlot) -> None:
        key = id(slot.parameter)
        if key in self._hooks:
            return
        previous = self._adapter.owners.get(slot.parameter)
        if previous is not None and (owner := previous()) is not None and owner is not self:
            owner._lose(slot.parameter)
        me = weakref.ref(self)
        self._adapter.owners[slot.parameter] = me
        self._hooks[key] = self._adapter.hook(slot.parameter, _hook_for(me, slot))

    def _lose(self, parameter: Any) -> None:
        """Note that another reducer has taken ``parameter`` over."""
        self._lost = (
            f"{self.slots[id(parameter)].name} was taken over by another DistributedOptimizer {callsite.here()}"
        )
        self._hooks.pop(id(parameter)).remove()

    def on_gradient(self, slot: GradSlot) -> None:
        """Handle a gradient that was just accumulated; runs inside backward."""
        if self._generation != context.init_count() or self._joins != context.join_count():
            self.follow_job()
        if not self.active:
            return
        self._fresh = False
        left = slot.passes_left = slot.passes_left - 1
        if left < 0:
            times = "backward pass" if self.passes == 1 else f"{self.passes} backward passes"
            raise out_of_turn(
                f"the gradient of {slot.name} came {self.passes - left} times since the last step, but "
                f"backward_passes_per_step is {self.passes}",
                f"Call optimizer.step() after every {times}; or make DistributedOptimizer with "
                f"backward_passes_per_step={self.passes - left} or more; or add the losses up before backward().",
            )
        bucket: Bucket | None = slot.bucket
        if bucket is not None:
            self._adapter.adopt(slot)
            if left == 0:
                bucket.incomplete -= 1
                if bucket.incomplete == 0:
                    bucket.submit()
        elif left == 0:
            self._note(slot)

    def _note(self, slot: GradSlot) -> None:
        if slot.unbucketed:
            self._start_unbucketed(slot)
            return
        slot.mark = self._adapter.mark(slot.parameter)
        if slot.arrival < 0:
            slot.arrival = self._arrivals
            self._arrivals += 1

    def _start_unbucketed(self, slot: GradSlot) -> None:
        slot.pending = self._adapter.start_unbucketed(slot, self.settings, f"{self._name}.{slot.name}")
        slot.mark = self._adapter.mark(slot.parameter)

    def _changed(self) -> str:
        """Return the name of an unbucketed parameter whose gradient changed after other ranks began to rely on it."""
        for slot in (*self._undecided, *self._unbucketed):
            mark, slot.mark = slot.mark, None
            if mark is not None and self._adapter.has_changed(slot.parameter, mark):
                return slot.name
        return ""

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is reduced over all ranks.

        Raises:
            OptimizerUseError: a gradient was changed in flight, or another optimizer took the parameters over.
            MismatchError: the ranks' parameters differ.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        self.follow_job()
        if not self.active:
            found = [(self._adapter.gradient(slot.parameter), slot.parameter) for slot in self.slots.values()]
            self._left_with = [id(gradient) for gradient, _ in found]
            # The id of a freed gradient may come again, so keep one.
            present = (pair for pair in found if pair[0] is not None)
            self._kept, _ = min(present, key=lambda pair: self._adapter.count(pair[1]), default=(None, None))
            return
        if self._lost:
            raise out_of_turn(
                f"the gradient of {self._lost.rstrip()}",
                "Step with that one alone; or delete the first one before making another of the same parameters.",
            )
        try:
            with self._adapter.quietly():
                self._synchronize()
        except HorovodInternalError:
            self._forget()
            raise
        except BaseException:
            self.drain()
            raise
        finally:
            self.rearm()

    def _synchronize(self) -> None:
        changed = self._changed()
        if self._undecided:
            self._decide()
        for bucket in self.buckets:
            if not bucket.in_flight:
                bucket.submit_incomplete()
        for slot in self._unbucketed:
            if slot.pending is None:
                self._start_unbucketed(slot)
        for bucket in self.buckets:
            bucket.finish()
        for slot in self._unbucketed:
            pending, slot.pending, slot.mark = slot.pending, None, None
            pending()
        if changed:
            # Raise only now: the other ranks rely on this rank's part in the reductions.
            raise changed_gradient(changed, self._collective.instead)

    def rearm(self) -> None:
        """Reset the counters for the next step's gradients."""
        passes = self.passes
        for slot in self.slots.values():
            slot.passes_left = passes
            slot.mark = None
        for bucket in self.buckets:
            bucket.incomplete = len(bucket.slots)
        self._fresh = True

    def drain(self) -> None:
        """Wait for operations in flight, and ignore their errors."""
        for bucket in self.buckets:
            if bucket.in_flight:
                with contextlib.suppress(HorovodInternalError, RuntimeError):
                    bucket.finish()
        for slot in self._unbucketed:
            if slot.pending is not None:
                pending, slot.pending = slot.pending, None
                with contextlib.suppress(HorovodInternalError):
                    pending()

    def _forget(self) -> None:
        for bucket in self.buckets:
            bucket.abandon()
        for slot in self._unbucketed:
            slot.pending = None

    def _decide(self) -> None:
        """Agree with the other ranks on undecided gradients, and assign them to buckets or to the unbucketed list."""
        slots = self._undecided
        found = survey(slots, self._name, self.settings, self._adapter)
        wanted = {id(slot.parameter) for slot in slots if slot.parameter is not None and found.seen(slot)}
        together = [group for group in self._groups if wanted.intersection(group)]
        wanted.update(key for group in together for key in group)
        chosen = [slot for slot in found.order if id(slot.parameter) in wanted]
        self._undecided = [slot for slot in slots if id(slot.parameter) not in wanted]
        items, place = [], {}
        for index, slot in enumerate(chosen):
            slot.sparse_dim = found.sparse_dim(slot)
            if self.settings.one_by_one or (slot.sparse_dim and not self.settings.sparse_as_dense):
                slot.unbucketed = True
                self._unbucketed.append(slot)
                continue
            place[id(slot.parameter)] = index
            parameter, of = slot.parameter, self._adapter
            items.append(Item(index, of.count(parameter), of.itemsize(parameter), of.kind(parameter)))
        groups = [[place[key] for key in group if key in place] for group in together]
        for layout in plan_buckets(items, self._bucket_bytes, groups, self._collective.shards):
            members = [chosen[index] for index in layout.indexes]
            name = f"{self._name}.bucket{len(self.buckets)}[{members[0].name}..{members[-1].name}]"
            bucket = Bucket(name, layout, members, self.settings, self._adapter, self._collective)
            self.buckets.append(bucket)
            # Submit immediately, so that at most one bucket's gradients exist twice in memory.
            bucket.submit_incomplete()
        logger.debug(
            f"{self._name}: {len(items)} gradients in {len(self.buckets)} buckets, {len(self._unbucketed)} alone, "
            f"{len(self._undecided)} not seen yet"
        )


def _allreduce(adapter: GradientAdapter, settings: ReduceSettings) -> BucketCollective:
    compressor = settings.bucket_compressor
    return CompressedAllreduce(adapter, settings, compressor) if compressor else Allreduce(adapter.comm, settings)


def _hook_for(reducer: weakref.ref[Reducer], slot: GradSlot) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        owner = reducer()
        if owner is not None:
            owner.on_gradient(slot)

    return hook


def _dismantle(slots: dict[int, GradSlot], hooks: dict[int, Any]) -> None:
    """Release hooks and memory when the reducer is gone; slots and buckets refer to each other."""
    for hook in hooks.values():
        hook.remove()
    for slot in slots.values():
        slot.reset(0)
