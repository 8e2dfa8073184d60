"""Operators with graphs of their own: conditions, loops, scans and calls; torch differentiates what they ran.

Where only shapes are asked for, a loop's body is entered once, both branches of a condition, and nothing that comes out
has a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from popart.errors import popart_exception
from popart.kernels.registry import GRAPHCORE, GraphNode, GraphRun, Inputs, Subgraph, operator

__all__: list[str] = []


def _blank(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [value.to("meta") for value in values]


def _kinds(values: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(value.shape), str(value.dtype).rpartition(".")[2]) for value in values]


def _unchanged(node: GraphNode, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    if _kinds(before) != _kinds(after):
        raise popart_exception(
            f"{node.op} {node.name!r}: what one iteration hands to the next must keep shape and dtype, on a device "
            f"that knows them before it runs. Before: {_kinds(before)}; after: {_kinds(after)}"
        )


def _check_count(node: GraphNode, graph: Subgraph, inputs: int, outputs: str | int) -> None:
    if len(graph.inputs) != inputs or (isinstance(outputs, int) and len(graph.outputs) != outputs):
        raise popart_exception(
            f"{node.op} {node.name!r} needs a subgraph of {inputs} inputs and {outputs} outputs; received one of "
            f"{len(graph.inputs)} and {len(graph.outputs)}: {list(graph.inputs)}, {list(graph.outputs)}"
        )


@operator("Call", domain=GRAPHCORE)
def _call(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    callee = node.attributes["callee"]
    _check_count(node, callee, len(inputs), len(node.outputs))
    return tuple(run.inside(callee, inputs))


@operator("If")
def _if(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    branches = [node.attributes[name] for name in ("then_branch", "else_branch")]
    for branch in branches:
        _check_count(node, branch, 0, len(node.outputs))
    if run.generator is not None:
        chosen = branches[0] if bool(inputs[0].reshape(()).item()) else branches[1]
        return tuple(run.inside(chosen, ()))
    found, other = (run.inside(branch, ()) for branch in branches)
    if _kinds(found) != _kinds(other):
        raise popart_exception(
            f"{node.op} {node.name!r}: both branches must give the same shapes and dtypes. Received: then "
            f"{_kinds(found)}, else {_kinds(other)}"
        )
    return tuple(_blank(found))


@operator("Loop", reads=(0,))
def _loop(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    body, carried = node.attributes["body"], list(inputs[2:])
    count = None if inputs[0] is None else int(inputs[0].reshape(()).item())
    _check_count(node, body, 2 + len(carried), f"{1 + len(carried)} or more")
    lists: list[list[torch.Tensor]] = [[] for _ in body.outputs[1 + len(carried) :]]
    if lists and count is None:
        raise popart_exception(f"Loop {node.name!r} stacks results of its iterations: give it their number")
    goes_on = torch.tensor(True) if inputs[1] is None else inputs[1]
    if run.generator is None:
        first = [torch.tensor(0, device="meta"), *_blank([goes_on, *carried])]
        _, *after = run.inside(body, first)
        _unchanged(node, carried, after[: len(carried)])
        stacked = [value.new_empty((count or 0, *value.shape), device="meta") for value in after[len(carried) :]]
        return (*_blank(after[: len(carried)]), *stacked)
    step = 0
    while (count is None or step < count) and bool(goes_on.reshape(()).item()):
        goes_on, *after = run.inside(body, [torch.tensor(step), goes_on, *carried])
        carried = after[: len(carried)]
        for rows, value in zip(lists, after[len(carried) :], strict=True):
            rows.append(value)
        step += 1
    if lists and step != count:
        raise popart_exception(
            f"Loop {node.name!r} ended after {step} of {count} iterations, and stacks their results: the device needs "
            "as many as it was told. Hand them on from one iteration to the next instead"
        )
    empty = _nothing(run, body, goes_on, carried) if lists and not step else []
    return (*carried, *(torch.stack(rows) for rows in lists if rows), *empty)


def _nothing(
    run: GraphRun, body: Subgraph, goes_on: torch.Tensor, carried: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The stacked results of no iteration."""
    with torch.no_grad():
        _, *after = run.inside(body, [torch.tensor(0), goes_on, *carried])
    return [value.new_empty((0, *value.shape)) for value in after[len(carried) :]]


@operator("Scan")
def _scan(run: GraphRun, node: GraphNode, inputs: Inputs) -> Any:
    body, given = node.attributes["body"], node.attributes
    scanned = int(given["num_scan_inputs"])
    carried, sequences = list(inputs[: len(inputs) - scanned]), list(inputs[len(inputs) - scanned :])
    if "directions" in given or None in inputs:
        raise popart_exception(f"Scan {node.name!r} is of version 8 of ONNX's operators: use version 9 or later")
    _check_count(node, body, len(inputs), len(node.outputs))
    stacked = len(body.outputs) - len(carried)
    axes = given.get("scan_input_axes") or [0] * scanned
    sequences = [sequence.movedim(axis, 0) for sequence, axis in zip(sequences, axes, strict=True)]
    lengths = {int(sequence.shape[0]) for sequence in sequences}
    if len(lengths) != 1:
        raise popart_exception(f"Scan {node.name!r} needs sequences of one length; received {sorted(lengths)}")
    sequences = _turned(sequences, given.get("scan_input_directions"))
    lists: list[list[torch.Tensor]] = [[] for _ in range(stacked)]
    for step in range(min(1, *lengths) if run.generator is None else lengths.pop()):
        after = run.inside(body, [*carried, *(sequence[step] for sequence in sequences)])
        _unchanged(node, carried, after[: len(carried)])
        carried = after[: len(carried)]
        for rows, value in zip(lists, after[len(carried) :], strict=True):
            rows.append(value)
    results = [torch.stack(rows) for rows in lists]
    if run.generator is None:
        results = [rows.new_empty((*lengths, *rows.shape[1:]), device="meta") for rows in results]
        carried = _blank(carried)
    results = _turned(results, given.get("scan_output_directions"))
    places = given.get("scan_output_axes") or [0] * stacked
    return (*carried, *(rows.movedim(0, axis) for rows, axis in zip(results, places, strict=True)))


def _turned(values: Sequence[torch.Tensor], directions: Sequence[int] | None) -> list[torch.Tensor]:
    """Reverse the first dimension of those whose direction is 1."""
    return [
        value.flip(0) if direction else value
        for value, direction in zip(values, directions or [0] * len(values), strict=True)
    ]
