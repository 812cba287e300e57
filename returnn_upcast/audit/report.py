"""
What the audit finds, as data: frozen in JSON by :meth:`AuditReport.to_json`, whose schema is :func:`json_schema`.
"""

from __future__ import annotations
from typing import Any, Dict, List, Optional, Tuple, Union, get_args, get_origin, get_type_hints
import dataclasses
import json
import math

SCHEMA_VERSION = 1


def _doc(text: str, **kwargs: Any) -> Any:
    return dataclasses.field(metadata={"doc": text}, **kwargs)


@dataclasses.dataclass
class LossResult:
    """One loss of one variant"""

    name: str = _doc("as given to mark_as_loss; for a forward step, the name of the output")
    value: float = _doc("normalised as RETURNN reports it, mean over the batches; for outputs, the Euclidean norm")
    reference: float = _doc("the same of the reference")
    difference: float = _doc("|value - reference| / |reference|, per batch, then the mean")


@dataclasses.dataclass
class ParamError:
    """Gradient of one parameter"""

    name: str = _doc("in the model")
    error: float = _doc("|g - reference| / |reference|, all batches together")
    share: float = _doc("|reference| of this parameter / that of the whole gradient")


@dataclasses.dataclass
class Variant:
    """The train step in one setting"""

    name: str = _doc("'off', 'on', or 'on without OP'")
    ops: List[str] = _doc("the ops in float32")
    losses: List[LossResult] = _doc("", default_factory=list)
    gradient_error: Optional[float] = _doc("|g - reference| / |reference|, all parameters and batches", default=None)
    batch_errors: List[float] = _doc("gradient_error of each batch", default_factory=list)
    median_param_error: Optional[float] = _doc("of the parameters' own relative errors, the median", default=None)
    worst_params: List[ParamError] = _doc("largest error first", default_factory=list)
    nonfinite: int = _doc("gradient elements and losses that are NaN or infinite", default=0)
    seconds: Optional[float] = _doc("per step: forward and backward, the first batch, best of several", default=None)
    memory: Optional[int] = _doc("bytes, see AuditReport.memory_kind", default=None)
    error: Optional[str] = _doc("type and message of the exception with which it failed", default=None)
    traceback: Optional[str] = _doc("of that exception", default=None)


@dataclasses.dataclass
class Noise:
    """How much the same variant differs from itself"""

    kind: str = _doc("'dropout' (another seed) or 'order' (another reduction order)")
    gradient: Optional[float] = _doc("relative difference of the two gradients")
    loss: float = _doc("largest relative difference of a loss")


@dataclasses.dataclass
class CallSite:
    """A hooked op at one place of the model"""

    path: str = _doc("of the module in the model; '(step)' outside of all modules")
    op: str = _doc("key of the policy")
    function: str = _doc("the entry point that was called, e.g. RMSNorm.__call__")
    line: str = _doc("file:line of the user's code that led there")
    calls: int = _doc("", default=0)
    shapes: List[str] = _doc("of the float inputs, first call", default_factory=list)
    dtypes_in: List[str] = _doc("of the float inputs", default_factory=list)
    dtype_inside: str = _doc("with the upcast on", default="")
    dtype_stock: str = _doc("of the stock result", default="")
    dtype_out: str = _doc("of the result with the upcast on", default="")
    low: bool = _doc("whether low precision takes part: else the upcast has nothing to do here", default=False)
    stock_error: Optional[float] = _doc("relative error against float64 on the same inputs", default=None)
    upcast_error: Optional[float] = _doc("the same with the upcast", default=None)
    floor: Optional[float] = _doc("the float64 result rounded once to dtype_out", default=None)
    max_input: float = _doc("largest magnitude of the inputs, padding excluded", default=0.0)
    max_output: float = _doc("of the result", default=0.0)
    limit: float = _doc("the largest number of the input's dtype", default=math.inf)
    stock_nonfinite: int = _doc("NaN and inf born in the stock op: inputs finite, output not", default=0)
    upcast_nonfinite: int = _doc("the same with the upcast", default=0)
    stock_zeros: int = _doc("elements that stock returns as 0 though they are not small", default=0)
    elements: int = _doc("of all results that were looked at", default=0)
    stock_exception: Optional[str] = _doc("type and message, if the stock op raises", default=None)
    cause: str = _doc("of what is wrong with stock here, in words; empty if nothing is", default="")
    lost_before: str = _doc("what was lost before the op could help; empty if nothing", default="")
    lost_line: str = _doc("file:line of the user's code that made it", default="")
    helper: str = _doc("what to use there", default="")


@dataclasses.dataclass
class AuditReport:
    """The whole audit"""

    name: str = _doc("of the config or model")
    versions: Dict[str, str] = _doc("returnn, torch, returnn_upcast")
    device: str = _doc("")
    precision: str = _doc("parameters and autocast")
    reference: str = _doc("float32 or float64")
    batches: List[str] = _doc("size of each")
    verdict: List[str] = _doc("plain words, ordered by effect", default_factory=list)
    effect: bool = _doc("whether the upcast changes anything", default=False)
    variants: List[Variant] = _doc("", default_factory=list)
    noise: List[Noise] = _doc("", default_factory=list)
    sites: List[CallSite] = _doc("", default_factory=list)
    autocast: Dict[str, Dict[str, str]] = _doc(
        "per device: torch function -> dtype of its result of low-precision inputs", default_factory=dict
    )
    memory_kind: str = _doc("what Variant.memory counts", default="")
    notes: List[str] = _doc("what was done differently than asked", default_factory=list)
    seconds: float = _doc("of the whole audit", default=0.0)
    schema_version: int = _doc("of this format", default=SCHEMA_VERSION)

    def variant(self, name: str) -> Optional[Variant]:
        """:return: the variant of that name, None if it was not run"""
        return next((v for v in self.variants if v.name == name), None)

    def to_dict(self) -> Dict[str, Any]:
        """:return: plain dicts, lists, strings, numbers; NaN and inf as strings"""
        return _plain(dataclasses.asdict(self))

    def to_json(self) -> str:
        """:return: JSON text, see :func:`json_schema`"""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        from .table import render

        return render(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_schema(cls: Any = AuditReport) -> Dict[str, Any]:
    """:return: JSON schema (2020-12) of :meth:`AuditReport.to_json`, made from the dataclasses and their texts"""
    hints, properties = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        properties[field.name] = {**_schema_of(hints[field.name])}
        if field.metadata["doc"]:
            properties[field.name]["description"] = field.metadata["doc"]
    return {
        "type": "object",
        "description": cls.__doc__,
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


_SIMPLE = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}


def _schema_of(hint: Any) -> Dict[str, Any]:
    origin: Any = get_origin(hint)
    args: Tuple[Any, ...] = get_args(hint)
    if origin is Union:
        return {"anyOf": [_schema_of(args[0]), {"type": "null"}]}
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(args[1])}
    if dataclasses.is_dataclass(hint):
        return json_schema(hint)
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    return dict(_SIMPLE[hint])
