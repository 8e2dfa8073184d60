"""Reducescatter of what lies in the arena: no copies through staging buffers, and inputs are free when it returns."""

from __future__ import annotations

from harness import on_ranks


@on_ranks(3)
def test_a_reducescatter_in_the_arena_is_not_staged_and_leaves_inputs_to_their_owner() -> None:
    import torch

    import horovod.torch as hvd
    from horovod import context

    rank, size, count = hvd.rank(), hvd.size(), 300_000
    engine = context.engine()
    rounds = engine.transport.staging.rounds  # type: ignore[attr-defined]
    staged: list[int] = []
    engine.transport.staging.rounds = lambda *args, **more: (staged.append(1), rounds(*args, **more))[1]  # type: ignore[attr-defined]
    gradients = hvd.zeros(size * count)
    for turn in range(40):
        gradients.fill_(turn + rank)
        found = hvd.reducescatter(gradients, op=hvd.Sum, name="g")
        # A rank with its result may write at once; the others must not see that.
        gradients.fill_(-1e6)
        assert bool((found == turn * size + size * (size - 1) / 2).all()), f"turn {turn}"
    assert not staged
    # One rank's tensor lies elsewhere: all pass through the buffers.
    mixed = gradients if rank else torch.empty(size * count)
    mixed.fill_(rank + 1.0)
    assert bool((hvd.reducescatter(mixed, op=hvd.Sum, name="m") == size * (size + 1) / 2).all())
    assert staged
