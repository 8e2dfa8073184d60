"""The distributed optimizer for op=Adasum: ranks combine their steps, not their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from horovod.bindings.compression import compress, decompress
from horovod.bindings.gradients.names import ADASUM
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import out_of_turn
from horovod.torch.optimizer_methods import Named, OptimizerMethods
from horovod.torch.runtime import comm

__all__ = ["AdasumMethods"]


class AdasumMethods(OptimizerMethods):
    """Methods of an Adasum optimizer, which override those of the wrapped optimizer's class.

    Every rank steps with its own gradients; the parameters then move by the Adasum of these steps.
    """

    def _make_reducer(self, settings: ReduceSettings) -> None:
        """Reduce no gradients; ``synchronize()`` then has nothing to wait for."""

    def skip_synchronize(self) -> NoReturn:
        """Refuse the call.

        Raises:
            OptimizerUseError: always; with Adasum a step always combines all ranks.
        """
        raise out_of_turn(
            "optimizer.skip_synchronize() was called with op=Adasum, which combines the ranks' steps in step()",
            "Change this rank's gradients before optimizer.step(), without skip_synchronize() and synchronize().",
        )

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step locally, and move the parameters by the Adasum of all ranks' steps.

        Args:
            closure: computes the gradients again.
            args: positional arguments for the wrapped optimizer's ``step``.
            kwargs: keyword arguments for the wrapped optimizer's ``step``.

        Returns:
            The value that the optimizer's own class returns.

        Raises:
            MismatchError: parameters differ between ranks.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

        Blocks until all ranks called it.
        """
        if closure is not None:
            args = (closure, *args)
        if not self.process_set.included():
            return self._own_step(*args, **kwargs)
        moved = list(self._trained())
        starts = [parameter.detach().clone(memory_format=torch.contiguous_format) for _, parameter in moved]
        result = self._own_step(*args, **kwargs)
        with torch.no_grad():
            self._combine(moved, starts)
        return result

    # Tell torch not to wrap this ``step`` with hooks: the wrapped optimizer's step already runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _combine(self, moved: Named, starts: list[torch.Tensor]) -> None:
        compression = self._settings.compression
        steps = [parameter.detach() - start for (_, parameter), start in zip(moved, starts, strict=True)]
        wires, contexts = compress(compression, steps)
        handles = [
            comm.allreduce_async_(wire.contiguous(), name=f"{ADASUM}.{name}", **self._settings.keywords)
            for (name, _), wire in zip(moved, wires, strict=True)
        ]
        reduced = decompress(compression, [comm.synchronize(handle) for handle in handles], contexts)
        for (_, parameter), start, step in zip(moved, starts, reduced, strict=True):
            parameter.copy_(start + step)
