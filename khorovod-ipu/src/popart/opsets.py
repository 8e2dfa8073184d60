"""``builder.aiOnnx`` and ``builder.aiGraphcore``: a method per operator.

Those of ONNX are generated from ONNX's schemas. Parameters: the inputs, then the number of outputs if it varies,
then the required attributes, then the optional ones, each group in alphabetical order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import numpy_helper

from khorovod_ipu.names import nearest
from popart.enums import ReductionType
from popart.errors import popart_exception
from popart.kernels import known_operators
from popart.tensors import onnx_type

__all__ = ["AiGraphcore", "AiOnnx"]

#: PopART's method names for operators that are Python keywords.
_WORDS = {f"logical_{word}": word for word in ("and", "or", "not", "xor", "if")}
#: Operators of ``ai.graphcore``: name of the operator, and the attributes after the inputs, with a default if
#: optional.
_TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    **{op.lower(): (op, {}) for op in (
        "Atan2", "Expm1", "Log1p", "Fmod", "Remainder", "Round", "NearbyInt", "Swish", "BitwiseAnd", "BitwiseOr",
        "BitwiseXor", "BitwiseNot",
    )},
    "nllloss": ("Nll", {"reduction": ReductionType.Mean, "ignoreIndex": None, "inputIsLogProbability": False}),
    "l1loss": ("L1", {"lambda_": ..., "reduction": ReductionType.Mean}),
    "identityloss": ("IdentityLoss", {"reduction": ReductionType.Mean}),
    "gelu": ("Gelu", {}),
    "scale": ("Scale", {"scale": ...}),
    "detach": ("Detach", {}),
    "nop": ("Nop", {}),
    "incrementmod": ("IncrementMod", {"increment": ..., "modulus": ...}),
    "reverse": ("Reverse", {"dimensions": ...}),
    "reshape": ("Reshape", {"shape": ...}),
    "subsample": ("Subsample", {"strides": ...}),
    "slice": ("Slice", {"ends": ..., "starts": ..., "axes": None}),
    "shapeddropout": ("ShapedDropout", {"shape": ..., "ratio": 0.5}),
    "dynamicslice": ("DynamicSlice", {"axes": ..., "sizes": ..., "noOverlap": 0}),
    "dynamicupdate": ("DynamicUpdate", {"axes": ..., "sizes": ..., "noOverlap": 0}),
    "dynamicadd": ("DynamicAdd", {"axes": ..., "sizes": ..., "noOverlap": 0}),
    "dynamiczero": ("DynamicZero", {"axes": ..., "sizes": ..., "noOverlap": 0}),
    "printtensor": ("PrintTensor", {"print_gradient": 1, "title": ""}),
}  # fmt: skip

_Parameter = inspect.Parameter
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic


class _Graph(Protocol):
    def add_node(
        self, op: str, domain: str, version: int, inputs: Sequence[str], outputs: int, attributes: dict[str, Any],
        label: str,
    ) -> list[str]: ...  # fmt: skip


class AiOnnx:
    """Operators of one version of ONNX.

    Args:
        graph: graph to which the operators are added.
        version: version of the operator set.
    """

    def __init__(self, graph: _Graph, version: int) -> None:
        self._graph, self._version = graph, version

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        op = _operators().get(_WORDS.get(name, name).lower())
        if op is None:
            raise AttributeError(f"aiOnnx has no operator {name!r} on the software device{nearest(name, _operators())}")
        try:
            schema = onnx.defs.get_schema(op, self._version)
        except onnx.defs.SchemaError:
            raise AttributeError(f"version {self._version} of ONNX's operators has no {name!r}") from None
        return _method(self._graph, schema, self._version)

    def __dir__(self) -> list[str]:
        return sorted({*_operators(), *_WORDS})


class AiGraphcore:
    """Operators of ``ai.graphcore``."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Callable[..., str]:
        if name not in _TABLE:
            known = [*_TABLE, *(word for word in dir(type(self)) if not word.startswith("_"))]
            raise AttributeError(f"aiGraphcore has no operator {name!r} on the software device{nearest(name, known)}")
        op, defaults = _TABLE[name]
        given = {"args": ..., **defaults, "debugContext": "", "debugPrefix": ""}
        kind = _Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature(
            [_Parameter(key, kind, default=_Parameter.empty if value is ... else value) for key, value in given.items()]
        )

        def add(*args: Any, **kwargs: Any) -> str:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"aiGraphcore.{name}{signature}: {error}") from None
            bound.apply_defaults()
            inputs, *attributes, label, old_label = bound.arguments.values()
            return self._add(op, inputs, dict(zip(defaults, attributes, strict=True)), label or old_label)

        add.__name__ = name
        return add

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_TABLE})

    def replicatedallreduce(self, args: Sequence[str], *_: Any, debugContext: Any = "", debugPrefix: Any = "") -> str:
        """Add a sum over replicas; the software device supports it only with one replica."""
        return self._add("ReplicatedAllReduce", args, {}, debugContext or debugPrefix)

    def groupnormalization(
        self, args: Sequence[str], num_groups: int, epsilon: float = 1e-5, debugContext: Any = "", debugPrefix: Any = ""
    ) -> list[str]:
        """Add normalization over groups of channels; one group is layer normalization. Returns result, mean, spread."""
        given = {"num_groups": int(num_groups), "epsilon": float(epsilon)}
        label = str(debugContext or debugPrefix)
        return self._graph.add_node("GroupNormalization", "ai.graphcore", 1, list(args), 3, given, label)

    def _add(self, op: str, args: Sequence[str], attributes: dict[str, Any], label: Any) -> str:
        if isinstance(args, str):
            raise popart_exception(f"{op.lower()} takes a list of tensors; received the string {args!r}")
        how = attributes.get("reduction")
        if how is not None and not isinstance(how, ReductionType):
            raise popart_exception(f"reduction must be a popart.ReductionType; received {how!r}")
        given = {**attributes, **({"reduction": how.value} if how is not None else {})}
        if "inputIsLogProbability" in given:
            given["inputIsLogProbability"] = int(given["inputIsLogProbability"])
        if "lambda_" in given:  # a keyword of Python
            given["lambda"] = float(given.pop("lambda_"))
        return self._graph.add_node(op, "ai.graphcore", 1, list(args), 1, given, str(label))[0]


@cache
def _operators() -> dict[str, str]:
    """Return the names of ONNX's operators by method name."""
    return {name.lower(): name for name in known_operators()}


def _method(graph: _Graph, schema: onnx.defs.OpSchema, version: int) -> Callable[..., Any]:
    varies = any(output.option in (_OPTIONAL, _VARIADIC) for output in schema.outputs)
    signature = _signature(schema, varies)

    def add(*args: Any, **kwargs: Any) -> Any:
        label = kwargs.pop("debugPrefix", "")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"aiOnnx.{schema.name.lower()}{signature}: {error}") from None
        given = dict(bound.arguments)
        label = str(given.pop("debugContext", "") or label)
        inputs = given.pop("args", ())
        count = int(given.pop("num_outputs", 1)) if varies else len(schema.outputs)
        if isinstance(inputs, str):
            raise popart_exception(f"{schema.name.lower()} takes a list of tensors; received the string {inputs!r}")
        attributes = {}
        for name, value in given.items():
            try:
                attributes[name] = _attribute(schema, name, value)
            except (TypeError, ValueError) as error:
                kind = str(schema.attributes[name].type).rpartition(".")[2]
                what = f"{schema.name.lower()}'s {name} is of type {kind}; received {value!r}"
                raise popart_exception(what) from error
        outputs = graph.add_node(schema.name, "", version, list(inputs), count, attributes, label)
        return outputs if varies or count > 1 else outputs[0]

    add.__name__, add.__doc__ = schema.name.lower(), schema.doc
    add.__signature__ = signature  # type: ignore[attr-defined]
    return add


def _signature(schema: onnx.defs.OpSchema, varies: bool) -> inspect.Signature:
    """Return the parameters of a method; with ``varies`` they include the number of outputs."""
    required = sorted(name for name, attribute in schema.attributes.items() if attribute.required)
    optional = sorted(schema.attributes.keys() - set(required))
    if schema.name == "Constant":  # one of the newer forms of its value is enough
        required, optional = ["value"], []
    kind = _Parameter.POSITIONAL_OR_KEYWORD
    parameters = [_Parameter(name, kind) for name in ["args"] * bool(schema.inputs) + required]
    if varies:
        # Give num_outputs no default if a required parameter follows it.
        is_needed = required or schema.outputs[0].option == _VARIADIC
        default = _Parameter.empty if is_needed else 1
        parameters.insert(int(bool(schema.inputs)), _Parameter("num_outputs", kind, default=default))
    parameters += [_Parameter(name, kind, default=None) for name in [*optional, "debugContext"]]
    return inspect.Signature(parameters)


def _attribute(schema: onnx.defs.OpSchema, name: str, value: Any) -> Any:
    """Return a value as an ONNX attribute."""
    if value is None:
        return None
    kind = schema.attributes[name].type
    types = onnx.defs.OpSchema.AttrType
    if kind == types.TENSOR:
        return numpy_helper.from_array(np.ascontiguousarray(value).reshape(np.shape(value)))
    if schema.name == "Cast" or name == "dtype":
        return onnx_type(value) if not isinstance(value, int) else value
    if kind == types.INTS:
        return [int(number) for number in ([value] if np.ndim(value) == 0 else value)]
    if kind == types.INT:
        return int(value)
    return float(value) if kind == types.FLOAT else value
