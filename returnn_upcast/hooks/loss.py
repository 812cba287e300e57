"""
Losses and (log-)softmax: the backend ops and :func:`rf.cross_entropy` bound to :mod:`returnn_upcast.ops.loss`.
"""

from __future__ import annotations
from typing import Any, Callable
import returnn.frontend as rf
from returnn.tensor import Tensor, Dim
from .. import dtypes as dtype_names
from ..ops import loss as ops
from ..ops.fuse import autocast_off
from .common import autocast_dtype, device_type, is_low, is_packed, is_torch, say_once, wrap


def _warn_low(op: str, log_probs: Tensor):
    say_once(
        op,
        f"rf_upcast: {op} got log-probs in {log_probs.dtype}: they were rounded before, and the loss can't be better"
        f" than that. rf.upcast.log_softmax returns them in float32.",
    )


def cross_entropy(original: Callable, *, estimated: Tensor, target: Tensor, axis: Dim, estimated_type: str) -> Tensor:
    """:func:`rf.cross_entropy`. With logits, it goes on to the backend's op, see :func:`cross_entropy_with_logits`"""
    kwargs = dict(estimated=estimated, target=target, axis=axis, estimated_type=estimated_type)
    dense = not target.sparse_dim
    # a matmul under autocast casts float32 log-probs down again
    cast_down = dense and dtype_names.is_float(estimated.dtype) and autocast_dtype(estimated) is not None
    low = is_low(estimated) or (dense and is_low(target))
    if estimated_type not in ("log-probs", "probs") or estimated.dtype == "float64" or not (low or cast_down):
        return original(**kwargs)
    if estimated_type == "log-probs" and is_low(estimated):
        _warn_low("cross_entropy", estimated)
    return cross_entropy_float32(original, **kwargs)


def cross_entropy_float32(
    original: Callable, *, estimated: Tensor, target: Tensor, axis: Dim, estimated_type: str
) -> Tensor:
    """:func:`rf.cross_entropy` of log-probs or probs, in at least float32"""
    with autocast_off(device_type(estimated)):
        if target.sparse_dim:
            # picked first, as that is exact, then widened
            picked = widen(rf.gather(estimated, indices=target, axis=axis))
            return -(rf.log(picked) if estimated_type == "probs" else picked)
        log_probs = rf.log(widen(estimated)) if estimated_type == "probs" else estimated
        if is_torch(estimated, target) and target.dims_set == estimated.dims_set:
            # no matmul: its backward might run under autocast
            raw_target = target.copy_compatible_to_dims_raw(log_probs.dims)
            raw = ops.nll_from_log_probs(log_probs.raw_tensor, raw_target, axis=log_probs.dims.index(axis))
            return _without_axis(log_probs, axis, raw)
        return original(estimated=widen(log_probs), target=widen(target), axis=axis, estimated_type="log-probs")


def widen(x: Tensor) -> Tensor:
    """:return: x in at least float32; what is no float stays"""
    return rf.cast(x, "float32") if dtype_names.is_low(x.dtype) else x


def _without_axis(x: Tensor, axis: Dim, raw: Any) -> Tensor:
    out = Tensor("cross_entropy", dims=[d for d in x.dims if d != axis], dtype=str(raw.dtype).split(".")[1])
    out.raw_tensor = raw
    return out


def cross_entropy_with_logits(original: Callable, *, logits: Tensor, targets: Tensor, axis: Dim) -> Tensor:
    """:func:`TorchBackend.softmax_cross_entropy_with_logits`"""
    if axis == targets.sparse_dim:
        dims = [d for d in logits.dims if d != axis]
    else:
        dims = logits.dims
    fits = (
        axis in logits.dims
        and set(dims) == targets.dims_set
        and (axis == targets.sparse_dim) == bool(targets.sparse_dim)
    )
    if not is_low(logits) or not is_torch(logits, targets) or not fits:
        return original(logits=logits, targets=targets, axis=axis)
    raw_targets = targets.copy_compatible_to_dims_raw(dims)
    if targets.sparse_dim:
        raw_targets = raw_targets.long()
    raw = ops.cross_entropy(logits.raw_tensor, raw_targets, axis=logits.dims.index(axis))
    return _without_axis(logits, axis, raw)


def ctc_loss(original: Callable, *, logits: Tensor, logits_normalized: bool = False, **kwargs: Any) -> Tensor:
    """:func:`TorchBackend.ctc_loss`: only the log_softmax is ours, the recursion gets float32 log-probs"""
    return _ctc("ctc_loss", original, logits, logits_normalized, kwargs)


def ctc_best_path(original: Callable, *, logits: Tensor, logits_normalized: bool = False, **kwargs: Any) -> Tensor:
    """:func:`TorchBackend.ctc_best_path`"""
    return _ctc("ctc_best_path", original, logits, logits_normalized, kwargs)


def _ctc(op: str, original: Callable, logits: Tensor, normalized: bool, kwargs: Any) -> Tensor:
    if not is_low(logits):
        return original(logits=logits, logits_normalized=normalized, **kwargs)
    if normalized:
        _warn_low(op, logits)
    with autocast_off(device_type(logits)):
        if normalized:
            wide = rf.cast(logits, "float32")
            log_probs = wrap(wide, ops.no_gradient_at_zero(wide.raw_tensor), "log_probs")
        else:
            log_probs = _log_probs(logits, kwargs["input_spatial_dim"])
        return original(logits=log_probs, logits_normalized=True, **kwargs)


def _log_probs(logits: Tensor, spatial_dim: Dim) -> Tensor:
    # time first and labels last is what the CTC kernels want, so that they copy nothing
    rest = logits.remaining_dims((spatial_dim, logits.feature_dim))
    view = logits.copy_transpose([spatial_dim, *rest, logits.feature_dim])
    raw = view.raw_tensor
    flat = raw if raw.ndim == 3 else raw.reshape(raw.shape[0], -1, raw.shape[-1])
    return wrap(view, ops.ctc_log_probs(flat).reshape(raw.shape), "log_probs")


def packed_ctc_loss(original: Callable, **kwargs: Any) -> Tensor:
    """:func:`PackedBackend.ctc_loss`: its native op computes in float32 already, there is only to say what came in"""
    if kwargs.get("logits_normalized") and is_low(kwargs["logits"]):
        _warn_low("ctc_loss", kwargs["logits"])
    return original(**kwargs)


def softmax(original: Callable, tensor: Tensor, *, axis: Dim, use_mask: bool = True) -> Tensor:
    """softmax or log_softmax of a backend, also over the packed axis: float32 out, as CUDA autocast does"""
    if not is_low(tensor) or (is_packed(tensor) and axis in tensor.raw_tensor.inner.dims):
        return original(tensor, axis=axis, use_mask=use_mask)
    with autocast_off(device_type(tensor)):
        return original(rf.cast(tensor, "float32"), axis=axis, use_mask=use_mask)
