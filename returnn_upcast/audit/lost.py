"""
What was lost before an op could help, whose code did it, and which helper avoids it.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Mapping, Optional, Tuple
import inspect
import torch
from returnn.tensor import Tensor
from . import causes, sources
from .. import dtypes

# what was lost, file:line, helper
Loss = Tuple[str, str, str]

_STATISTICS = ("MeanBackward", "VarBackward", "StdBackward", "RsqrtBackward", "SqrtBackward")


def _is_low(x: Any) -> bool:
    return isinstance(x, Tensor) and dtypes.is_low(x.dtype)


def _raw(x: Tensor) -> torch.Tensor:
    while not isinstance(x.raw_tensor, torch.Tensor):
        x = x.raw_tensor.inner
    return x.raw_tensor


def _log_probs(op: str, args: Mapping[str, Any]) -> Optional[Loss]:
    if op == "cross_entropy":
        kind, x = args.get("estimated_type", "logits"), args.get("estimated")
    else:
        kind, x = "log-probs" if args.get("logits_normalized") else "logits", args.get("logits")
    if kind == "logits" or not _is_low(x):
        return None
    raw = _raw(x)
    softmax = sources.find(raw, lambda node: "Softmax" in node.name())
    what = f"{kind} were rounded to {x.dtype} before the loss got them"
    helper = "rf.upcast.log_softmax" if kind == "log-probs" else "rf.upcast.softmax"
    return what, softmax or sources.made_at(raw), helper


def _encoding(op: str, args: Mapping[str, Any]) -> Optional[Loss]:
    indices, encoding = args.get("indices"), args.get("pos_enc")
    if _is_low(indices):
        what = f"the positions came in {indices.dtype}, which holds integers only up to {causes.exact_integers(indices.dtype):,}"
        return what, sources.made_at(_raw(indices)), "integer positions, or rf.upcast.float32"
    if _is_low(encoding):
        what = f"the encoding came in {encoding.dtype}, rounded before the rotation"
        return what, sources.made_at(_raw(encoding)), 'rf.sinusoidal_positional_encoding(..., dtype="float32")'
    return None


def _norm(op: str, args: Mapping[str, Any]) -> Optional[Loss]:
    x = next((args[key] for key in ("x", "a", "source") if key in args), None)
    module = args.get("self")
    running = args.get("running_mean", getattr(module, "running_mean", None))
    if op == "batch_norm" and _is_low(running):
        return f"the running statistics are kept in {running.dtype}", "", "rf.cast of these buffers to float32"
    if not _is_low(x):
        return None
    line = sources.find(_raw(x), _is_low_statistics, depth=4)
    if not line:
        return None
    return f"statistics were taken and rounded in {x.dtype} by hand before this norm", line, "@rf.upcast.in_float32"


def _is_low_statistics(node: Any) -> bool:
    metadata = getattr(node, "_input_metadata", None)  # torch 2.6 has it
    low = bool(metadata) and metadata[0].dtype.is_floating_point and metadata[0].dtype.itemsize < 4
    return low and node.name().startswith(_STATISTICS)


_CHECKS: Dict[str, Callable[[str, Mapping[str, Any]], Optional[Loss]]] = {
    "cross_entropy": _log_probs,
    "ctc_loss": _log_probs,
    "positional_encoding": _encoding,
    **{op: _norm for op in ("layer_norm", "rms_norm", "group_norm", "batch_norm", "normalize")},
}


def lost_before(op: str, func: Callable, args: Any, kwargs: Any, line: str) -> Optional[Loss]:
    """
    :param op: key of the policy
    :param func: the entry point
    :param args: of the call
    :param kwargs: of the call
    :param line: of the call, where the graph knows no better
    :return: what was lost, "file:line" of the user's code that did it, and what to use there; None if nothing was
    """
    check = _CHECKS.get(op)
    if check is None:
        return None
    found = check(op, inspect.signature(func).bind(*args, **kwargs).arguments)
    return found and (found[0], found[1] or line, found[2])
