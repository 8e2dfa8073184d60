"""``DistributedOptimizer(..., host_optimizer=True)``: every rank steps its share of the weights.

Buckets are reduce-scattered instead of allreduced. Each rank steps its share of each bucket with the wrapped
class, over flat pieces of the parameters; then an allgather sends all weights to all ranks. Only pieces have state.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from horovod.bindings.gradients.collective import BucketCollective, ReduceScatter
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import out_of_turn, wrong_argument
from horovod.bindings.objects import broadcast_object
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.submission import find_overlaps
from horovod.core.requests import ReduceOp
from horovod.torch.optimizer_methods import OptimizerMethods
from horovod.torch.optimizer_state import parameters_of
from horovod.torch.runtime import comm
from horovod.torch.shard_state import cut, gather
from horovod.torch.shards import Shard, WeightPiece, check_elementwise, clip_norm, unhooked_step

__all__ = ["HostMethods", "check_shardable"]

#: Key in the state_dict() of ranks that do not receive the state; its value is the rank that does.
_ELSEWHERE = "state_is_on_rank"


def check_shardable(optimizer: torch.optim.Optimizer, settings: ReduceSettings, wanted: Any) -> None:
    """Raise RequestError for settings and parameters that do not work with ``host_optimizer``."""
    if not isinstance(wanted, bool):
        raise wrong_argument(f"host_optimizer must be True or False. Received: {type(wanted).__name__}")
    check_elementwise(optimizer)
    if settings.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise wrong_argument(f"host_optimizer needs op=Average or op=Sum. Received: op={settings.op.name}")
    if settings.one_by_one:
        raise wrong_argument(
            "host_optimizer can send gradients with Compression.none, .fp16 and .bf16 only. "
            f"Received: compression={settings.compression!r}"
        )
    learning = [p for p in parameters_of(optimizer) if p.requires_grad]
    places = [(p.data_ptr(), p.numel() * p.element_size()) for p in learning]
    for index, other in find_overlaps(places).items():
        raise wrong_argument(
            f"host_optimizer needs parameters that share no memory. Received: number {min(index, other)} and "
            f"{max(index, other)}, of shapes {list(learning[index].shape)} and {list(learning[other].shape)}. Tied "
            "weights must be one Parameter, as in decoder.weight = encoder.weight"
        )


class HostMethods(OptimizerMethods):
    """Methods of an optimizer with ``host_optimizer``, which override those of the wrapped optimizer's class."""

    # Defaults for a copy of the optimizer, which has no instance attributes of ours.
    _shards: Mapping[str, Shard] = MappingProxyType({})
    _inner: Any = None
    state: Any

    def _collective(self, settings: ReduceSettings) -> BucketCollective:
        return ReduceScatter(comm, settings)

    def _shard(self, kind: type) -> None:
        """Make the optimizer of the pieces; ``kind`` is the wrapped optimizer's class."""
        self._shards = {}
        # The inner optimizer has the same options, but must not call the user's hooks a second time.
        self._inner = object.__new__(kind)
        self._inner.__dict__.update(vars(self), state=defaultdict(dict), param_groups=[])
        for name in ("_reducer", "_shards", "_inner", "_parameter_names"):
            self._inner.__dict__.pop(name, None)
        self._inner._optimizer_step_pre_hooks = OrderedDict()
        self._inner._optimizer_step_post_hooks = OrderedDict()
        self._step_pieces = unhooked_step(kind)

    # -- a step --------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until this rank has its share of the reduced gradients; ``p.grad`` stays this rank's own gradient.

        Called by ``step()`` and by ``clip_grad_norm_()``.

        Raises:
            OptimizerUseError: a gradient was changed before it was reduced.
            RequestError: there are sparse gradients; on every rank.
            MismatchError: parameters differ between ranks.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

        Blocks until all ranks called it.
        """
        super().synchronize()
        if self._works_alone():
            return
        assert self._reducer is not None
        if self._reducer.has_unbucketed:
            raise wrong_argument(
                "host_optimizer cannot step sparse gradients, which some ranks had; make DistributedOptimizer with "
                "sparse_as_dense=True, or without host_optimizer"
            )
        with torch.no_grad():
            self._follow_buckets()
            for shard in self._shards.values():
                shard.receive()

    def _follow_buckets(self) -> None:
        """Make a shard for each bucket, and cut existing state into the pieces."""
        assert self._reducer is not None
        buckets = {bucket.name: bucket for bucket in self._reducer.buckets}
        if any(buckets.get(name) is not shard.bucket for name, shard in self._shards.items()):
            # The ranks have agreed on new buckets after join().
            self._whole_state()
            self._shards = {}
            self._inner.state.clear()
        new = {name: Shard(bucket, self.process_set) for name, bucket in buckets.items() if name not in self._shards}
        self._shards = {**self._shards, **new}
        for shard in self._shards.values():
            shard.settle()
        if not self.state:
            return
        for shard in self._shards.values():
            for slot in shard.bucket.slots:
                state, piece = self.state.pop(slot.parameter, None), shard.pieces.get(id(slot.parameter))
                if state and piece is not None:
                    self._inner.state[piece.weights] = cut(state, piece)

    def _own_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._works_alone():
            return HostMethods._step_shards(self, *args, **kwargs)
        if self._inner is not None and self._inner.state:
            raise out_of_turn(
                "optimizer.step() was called on a rank that works alone now, but has only its share of the state",
                "Load a checkpoint of the optimizer after ranks have changed.",
            )
        return super()._own_step(*args, **kwargs)

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def _step_shards(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for shard in self._shards.values():
            if name := shard.bucket.changed():
                raise out_of_turn(
                    f"the gradient of {name} was changed after it was reduced, which has no effect: no rank has all "
                    "of it",
                    "To clip, call optimizer.clip_grad_norm_(max_norm) before optimizer.step().",
                )
        numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        for shard in self._shards.values():
            self._inner.param_groups = [
                {**self.param_groups[number], "params": pieces} for number, pieces in shard.by_group(numbers).items()
            ]
            if self._inner.param_groups:
                self._step_pieces(self._inner)
            shard.send()
        self._inner.param_groups = []
        try:
            for shard in self._shards.values():
                shard.arrive()
        finally:
            for shard in self._shards.values():
                shard.abandon()
        return loss

    # -- gradients -----------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
        """Scale all gradients to a common norm of at most ``max_norm``; call it between ``backward()`` and ``step()``.

        Equivalent to ``synchronize()`` and ``torch.nn.utils.clip_grad_norm_`` if every rank had all gradients.
        Collective: call it on every rank.

        Args:
            max_norm: the largest allowed norm.
            norm_type: order of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: raise RuntimeError, on every rank, when the norm is NaN or infinite.

        Returns:
            The norm before clipping, as a tensor; the same on every rank.

        Raises:
            OptimizerUseError: a gradient was changed before it was reduced.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        self._synchronize_for_step()
        if self._works_alone():
            return torch.nn.utils.clip_grad_norm_(self._all(), max_norm, norm_type, error_if_nonfinite)
        return clip_norm(self._gradients(), max_norm, norm_type, error_if_nonfinite, self.process_set)

    def clip_grad_value_(self, clip_value_: float) -> None:
        """Clip every element of every gradient to ``[-clip_value_, clip_value_]``; see ``clip_grad_norm_``."""
        self._synchronize_for_step()
        if self._works_alone():
            torch.nn.utils.clip_grad_value_(self._all(), clip_value_)
        else:
            for gradient in self._gradients():
                gradient.clamp_(-clip_value_, clip_value_)

    def _synchronize_for_step(self) -> None:
        if not (self._synchronized and self._is_fresh()):
            self.synchronize()
        self._means_synchronized = True

    def _all(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[torch.Tensor]:
        return [gradient for shard in self._shards.values() for gradient in shard.gradients()]

    def _before_scaled_step(self) -> None:
        if self._works_alone():
            return
        raise out_of_turn(
            "a GradScaler was used with host_optimizer, where no rank has the gradients that it would unscale",
            "Train with bfloat16, which needs no scaling, or make DistributedOptimizer without host_optimizer.",
        )

    def __getstate__(self) -> Any:
        if self._shards:
            raise out_of_turn(
                "an optimizer with host_optimizer was copied or pickled, but this rank has only a part of its state",
                "Call its state_dict() on every rank, and pass that on.",
            )
        return super().__getstate__()  # type: ignore[misc]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on the first rank, in torch's format; a plain optimizer can load it.

        Collective: call it on every rank, between steps. Other ranks get only the options.

        Raises:
            OptimizerUseError: gradients are being reduced; ``step()`` must come first.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        own: Callable[[], dict[str, Any]] = super().state_dict  # type: ignore[misc]
        if self._others_count_on_gradients():
            raise out_of_turn(
                "optimizer.state_dict() was called after loss.backward() and before optimizer.step()",
                "Call it after optimizer.step(), on every rank.",
            )
        if self._works_alone() or not self._shards:
            return own()
        return self._with_whole_state(own, to_all=False)

    def _whole_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` with the whole state on every rank. Collective."""
        own: Callable[[], dict[str, Any]] = super().state_dict  # type: ignore[misc]
        return own() if self._works_alone() or not self._shards else self._with_whole_state(own, to_all=True)

    def _gather_shards(self) -> None:
        """Gather the whole state on every rank before a membership change. Collective."""
        if self._shards and not self._works_alone():
            self._whole_state()
            self._forget_shards()

    def _forget_shards(self) -> None:
        """Drop this rank's part of the state; parameters keep their values."""
        self._shards = {}
        if self._inner is not None:
            self._inner.state.clear()

    def _with_whole_state(self, own: Callable[[], dict[str, Any]], to_all: bool) -> dict[str, Any]:
        before = dict(self.state)
        whole = gather(self._sharded(), self._pieces(), self.process_set, to_all)
        try:
            self.state.update(whole or {})
            found = own()
        finally:
            self.state.clear()
            self.state.update(before)
        if whole is None:
            found[_ELSEWHERE] = (self.process_set.ranks or [0])[0]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state from the first rank's ``state_dict()`` or a plain optimizer's; the same on every rank.

        Each rank keeps only its share from the next step on. If one rank loads alone, call
        ``broadcast_optimizer_state`` afterwards.

        Raises:
            RequestError: ``state_dict`` comes from a rank other than the first.
        """
        if _ELSEWHERE in state_dict:
            raise wrong_argument(
                f"this state_dict() holds no state: rank {state_dict[_ELSEWHERE]} alone got it. Save that rank's, and "
                "load it on every rank"
            )
        super().load_state_dict(state_dict)
        self._inner.state.clear()

    def _sharded(self) -> list[tuple[str, torch.Tensor]]:
        return [(slot.name, slot.parameter) for shard in self._shards.values() for slot in shard.bucket.slots]

    def _pieces(self) -> dict[int, tuple[WeightPiece, dict[str, Any]]]:
        known = self._inner.state
        return {
            key: (piece, known.get(piece.weights, {}))
            for shard in self._shards.values()
            for key, piece in shard.pieces.items()
        }

    def _whole_state(self) -> None:
        """Gather the whole state into ``self.state`` on every rank, as if it had been loaded."""
        whole = gather(self._sharded(), self._pieces(), self.process_set, to_all=True)
        self.state.update(whole or {})

    def _share_before_broadcast(self, root_rank: int, process_set: ProcessSet) -> bool:
        """Prepare for ``broadcast_optimizer_state``; return whether the state exists and is already in shards."""
        has_whole = bool(self.state)
        in_shards: bool = broadcast_object(not has_whole and bool(self._inner.state), root_rank, None, process_set)
        if in_shards and has_whole:
            raise out_of_turn(
                f"a state was loaded on this rank, but not on rank {root_rank}, whose state all ranks would get",
                "Load it on the root rank, or on every rank.",
            )
        if not in_shards:
            self._inner.state.clear()
        return in_shards
