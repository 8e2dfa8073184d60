"""Gradient tapes whose gradients are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings.docstrings import explained_like
from horovod.bindings.gradients.parameters import groups_argument, predivided
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp
from horovod.tensorflow.collectives import members_of
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.reducing import GradientSettings, divided, key_of, make_reducer

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

_NONE = tf.UnconnectedGradients.NONE


class _Distributed:
    """Methods that a distributed tape adds to its own class."""

    _horovod_settings: GradientSettings
    _horovod_scale_local: bool
    _horovod_local: dict[int, Any]

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a source local to this rank: it is not reduced.

        Args:
            source: a variable or tensor that only this rank has, or that each rank trains separately.
        """
        self._horovod_local[key_of(source)] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
        unconnected_gradients: Any = _NONE,
    ) -> Any:
        """Compute gradients with the tape, and combine them over all ranks.

        Args:
            target: values to differentiate.
            sources: variables and tensors to differentiate by; same order on all ranks.
            output_gradients: gradient of each element of the target.
            use_generic_names: accepted and ignored: names always follow from the order of the sources.
            unconnected_gradients: gradient for a source on which the target does not depend.

        Returns:
            Gradients in the structure of ``sources``.

        Raises:
            MismatchError: the ranks' sources differ, or their order does.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        if isinstance(use_generic_names, tf.UnconnectedGradients):
            unconnected_gradients = use_generic_names
        local, shared = self._split(target, sources, output_gradients, unconnected_gradients)
        found = {key_of(source): grad for source, grad in (*local, *shared)}
        return tf.nest.map_structure(lambda source: found[key_of(source)], sources)

    @explained_like(gradient)
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Compute gradients, and return local and reduced ones separately.

        Returns:
            Pairs of source and gradient: those of local sources, and those of the other sources.
        """
        return self._split(target, sources, output_gradients, _NONE)

    def _split(
        self, target: Any, sources: Any, output_gradients: Any, unconnected: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        flat = tf.nest.flatten(sources)
        grads = super().gradient(target, flat, output_gradients, unconnected)  # type: ignore[misc]
        settings = self._horovod_settings
        pairs = list(zip(flat, grads, strict=True))
        local = [pair for pair in pairs if key_of(pair[0]) in self._horovod_local]
        shared = [pair for pair in pairs if key_of(pair[0]) not in self._horovod_local]
        if self._horovod_scale_local:
            local = [(source, divided(grad, members_of(settings.process_set))) for source, grad in local]
        reduced = make_reducer(settings)([grad for _, grad in shared], [source for source, _ in shared])
        return local, [(source, grad) for (source, _), grad in zip(shared, reduced, strict=True)]


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose ``gradient()`` combines the gradients of all ranks.

    Args:
        gradtape: the tape, recorded before or after this call, through either tape object. If it is distributed
            already, these settings replace its own, and it keeps its local sources.
        device_dense: accepted; tensors travel through host memory.
        device_sparse: accepted and ignored.
        compression: compressor of the gradients, such as ``Compression.fp16``.
        sparse_as_dense: whether to send IndexedSlices as dense tensors: faster if most rows have a gradient.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: divisor on each rank before the sum; the sum is divided by size / factor afterwards.
        num_groups: deprecated; use ``groups``.
        groups: number of groups, or lists of variables whose gradients are reduced together; ``None`` groups
            gradients in the order in which they become ready.
        process_set: ranks that take part.
        scale_local_gradients: whether to divide gradients of local sources by the number of ranks.

    Returns:
        A tape of the same class as ``gradtape``, with ``register_local_source(source)``.

    Raises:
        ValueError: an argument is invalid, or arguments are incompatible.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise wrong_argument(f"gradtape must be a tf.GradientTape. Received: {type_name(gradtape)}")
    op, groups = resolve_op(op, None), groups_argument(num_groups, groups)
    settings = GradientSettings(
        op, *predivided(op, gradient_predivide_factor), process_set, compression, sparse_as_dense,
        "DistributedGradientTape", groups,
    )  # fmt: skip
    known = gradtape._horovod_local if isinstance(gradtape, _Distributed) else {}
    # Unwrap a distributed tape, so that gradients are combined only once.
    base = type(gradtape).__bases__[1] if isinstance(gradtape, _Distributed) else type(gradtape)
    tape: Any = object.__new__(type(base.__name__, (_Distributed, base), {"__module__": base.__module__}))
    # Share the state, so that a recording by either tape is visible to both.
    tape.__dict__ = gradtape.__dict__
    tape._horovod_settings, tape._horovod_scale_local, tape._horovod_local = settings, scale_local_gradients, known
    return tape


@explained_like(DistributedGradientTape, local_layers="a layer of Keras, or several, whose gradients are not reduced.")
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a distributed tape that does not reduce the gradients of some layers. See ``DistributedGradientTape``."""
    given = [] if local_layers is None else local_layers
    layers = given if isinstance(given, list | tuple) else [given]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"All local layers must be of a Layer type. Received: {type(layer).__name__}")
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in (variable for layer in layers for variable in layer.trainable_weights):
        tape.register_local_source(variable)
    return tape
