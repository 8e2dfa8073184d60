"""The only JAX primitive behind all collectives: shapes, derivatives, batching and eager execution.

Gradients follow the convention of ``horovod.torch``, see docs/torch.md, "Gradients of the operations". Tangents, in
forward mode, are what the operation does to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from horovod.core.collectives import keeps_shape, result_shapes
from horovod.core.requests import Kind, ReduceOp, Request, Response, TensorSpec
from horovod.jax.calls import CollectiveCall, run_eagerly, split_watched
from horovod.splits import part_of

__all__ = ["collective", "collective_p"]

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)

collective_p = Primitive("horovod")
collective_p.multiple_results = True


def collective(call: CollectiveCall, arrays: Sequence[Any]) -> list[Any]:
    """Run a call, or make it part of the program that JAX traces; return one result for each array."""
    return list(collective_p.bind(*arrays, call=call)) if arrays else []


@collective_p.def_impl
def _run(*arrays: Any, call: CollectiveCall) -> list[jax.Array]:
    # Under grad, an input that is a numpy array arrives as a numpy array.
    return run_eagerly(call, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays])


# -- shapes ------------------------------------------------------------------------------------------------------


@collective_p.def_abstract_eval
def _shapes(*arrays: Any, call: CollectiveCall) -> list[ShapedArray]:
    return [
        array.update(shape=_shape(call, index, array), weak_type=False)
        for index, array in enumerate(split_watched(call, arrays)[0])
    ]


def _shape(call: CollectiveCall, index: int, array: Any) -> tuple[int, ...]:
    """Return the shape of the result of an array; all ranks have arrays of one shape unless ``rows`` are known."""
    if call.rows is not None:
        return (sum(call.rows[index]), *array.shape[1:])
    request = Request("", call.kind, tensors=(TensorSpec(array.dtype.name, array.shape),), root=call.root)
    ranks = call.process_set.ranks or ()
    members = tuple(ranks) if len(ranks) == call.size else tuple(range(call.size))  # else some have joined
    return result_shapes(Response(call.kind, "", 0, members, requests=(request,)), call.place)[0]


def _shares(call: CollectiveCall, rows: int) -> tuple[int, ...]:
    """Return the number of rows that each member gets from a reducescatter of ``rows`` rows."""
    return tuple(len(range(*part_of(rows, call.size, index))) for index in range(call.size))


# -- forward mode ------------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: CollectiveCall) -> tuple[list[Any], list[Any]]:
    results = collective(call, primals)
    # The program decides which inputs have a derivative, so all ranks skip the same ones.
    moving = [i for i, tangent in enumerate(tangents[: len(results)]) if not isinstance(tangent, ad.Zero)]
    moved = [ad.Zero(_tangent_type(result)) for result in results]
    if not moving:
        return results, moved
    own = [tangents[i] for i in moving]
    rows = None if call.rows is None else tuple(call.rows[i] for i in moving)
    if call.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) and call.op not in _LINEAR:
        if call.kind is Kind.REDUCESCATTER:
            raise NotImplementedError(
                f"reducescatter is differentiable for Sum and Average only. Received: {call.op.name.capitalize()}"
            )
        slopes = _slopes(call, [primals[i] for i in moving], [results[i] for i in moving])
        own = [slope * tangent for slope, tangent in zip(slopes, own, strict=True)]
        after = collective(call.tangent(op=ReduceOp.SUM, prescale=1.0, postscale=1.0), own)
    else:
        after = collective(call.tangent(rows=rows), own)
    for index, tangent in zip(moving, after, strict=True):
        moved[index] = tangent
    return results, moved


ad.primitive_jvps[collective_p] = _jvp


def _tangent_type(result: Any) -> Any:
    return jax.typeof(result).to_tangent_aval()


def _slopes(call: CollectiveCall, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return d output / d this rank's input, elementwise, for the operations that are not linear."""
    factor = call.prescale * call.postscale
    total = {"op": ReduceOp.SUM, "prescale": 1.0, "postscale": 1.0}
    if call.op in (ReduceOp.MIN, ReduceOp.MAX):
        # The same arithmetic as forward, so that this rank's value compares equal to the output it gave.
        winners = [
            (_as_sent(_as_sent(x) * call.prescale) * call.postscale == y).astype(x.dtype)
            for x, y in zip(inputs, outputs, strict=True)
        ]
        ties = collective(_aside(call, "ties", **total), winners)
        return [won * factor / jnp.maximum(tied, 1) for won, tied in zip(winners, ties, strict=True)]
    scaled = [x * call.prescale for x in inputs]
    zero = [(x == 0).astype(x.dtype) for x in scaled]
    zeros = collective(_aside(call, "zeros", **total), zero)
    nonzero = [jnp.where(x == 0, jnp.ones_like(x), x) for x in scaled]
    whole = collective(_aside(call, "product", op=ReduceOp.PRODUCT, prescale=1.0, postscale=1.0), nonzero)
    return [
        jnp.where(found - z == 0, product / own, jnp.zeros_like(product)) * factor
        for found, z, product, own in zip(zeros, zero, whole, nonzero, strict=True)
    ]


def _as_sent(x: Any) -> Any:
    """Keep XLA from computing ``x`` again in a fusion, or from joining two factors; both may round differently."""
    return lax.optimization_barrier(lax.stop_gradient(x))


def _aside(call: CollectiveCall, what: str, **changes: Any) -> CollectiveCall:
    return replace(call, suffix=f"{call.suffix}.{what}", watched=(), **changes)


# -- reverse mode ------------------------------------------------------------------------------------------------


def _transpose(cotangents: Sequence[Any], *inputs: Any, call: CollectiveCall) -> list[Any]:
    gradients: list[Any] = [None] * len(inputs)
    # As in _jvp, all ranks skip the same inputs.
    needed = [i for i, x in enumerate(inputs) if ad.is_undefined_primal(x) and not isinstance(cotangents[i], ad.Zero)]
    for index, x in enumerate(inputs):
        if ad.is_undefined_primal(x) and index not in needed:
            gradients[index] = ad.Zero(x.aval)
    if needed:
        shapes = [inputs[i].aval.shape for i in needed]
        rows = None if call.rows is None else tuple(call.rows[i] for i in needed)
        for index, gradient in zip(needed, _back(call, [cotangents[i] for i in needed], shapes, rows), strict=True):
            gradients[index] = gradient
    return gradients


ad.primitive_transposes[collective_p] = _transpose


def _back(call: CollectiveCall, grads: list[Any], shapes: list[tuple[int, ...]], rows: Any) -> list[Any]:
    """Return the gradients of the inputs, of the given ``shapes``, from the gradients of the results."""
    if call.kind is Kind.ALLREDUCE:
        if call.only_root >= 0:
            return collective(call.gradient(kind=Kind.BROADCAST, root=call.only_root, only_root=-1), grads)
        return collective(call.gradient(), grads)
    if call.kind is Kind.BROADCAST:
        return collective(call.gradient(kind=Kind.ALLREDUCE, op=ReduceOp.AVERAGE, only_root=call.root), grads)
    if call.kind is Kind.ALLTOALL:
        if rows is None:
            return collective(call.gradient(), grads)
        return [
            collective(call.gradient(splits=received, rows=(call.splits,)), [grad])[0]
            for grad, received in zip(grads, rows, strict=True)
        ]
    if call.kind is Kind.REDUCESCATTER:
        factor = call.prescale * call.postscale * (call.process_set.size() or 1 if call.op is ReduceOp.SUM else 1)
        scaled = grads if factor == 1.0 else [grad * factor for grad in grads]
        shares = tuple(_shares(call, shape[0]) for shape in shapes)
        return collective(call.gradient(kind=Kind.ALLGATHER, rows=shares), scaled)
    if call.kind is not Kind.ALLGATHER:
        raise NotImplementedError(
            f"{call.verb} has no derivative in JAX: leave it out of functions that JAX differentiates"
        )
    # Not a reducescatter, whose own gradient is of another scale: programs would have other second derivatives.
    me, rows = call.place, rows or [(shape[0],) * call.size for shape in shapes]
    reduced = collective(call.gradient(kind=Kind.ALLREDUCE, op=ReduceOp.AVERAGE, rows=None), grads)
    before = [sum(own[:me]) for own in rows]
    return [
        lax.slice_in_dim(grad, start, start + own[me]) for grad, start, own in zip(reduced, before, rows, strict=True)
    ]


# -- vmap --------------------------------------------------------------------------------------------------------


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: CollectiveCall) -> tuple[list[Any], list[Any]]:
    """Run one collective for the whole batch; the batch dimension never becomes the dimension of the rows."""
    if call.op is ReduceOp.ADASUM and call.kind is Kind.ALLREDUCE:
        raise NotImplementedError(
            "Adasum under vmap would combine every element of the batch by itself; call it outside of vmap"
        )
    arrays, call = split_watched(call, arrays)[0], replace(call, watched=())
    dims = dims[: len(arrays)]
    if keeps_shape(call.kind):
        return collective(call, arrays), list(dims)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in zip(arrays, dims, strict=True)]
    return collective(call, moved), [None if dim is None else 1 for dim in dims]


batching.primitive_batchers[collective_p] = _batch
