"""
What users see as ``rf.upcast``: float32 inside, whatever the policy says.

For the code that no option can reach, mostly a loss that is built from several calls. Each function has the signature
of the ``rf`` function that it stands for, takes padded and packed tensors, and returns at least float32.
"""

from __future__ import annotations
from typing import Any, Callable, ContextManager, Sequence, TypeVar, Union
import contextlib
import functools
import returnn.frontend as rf
from returnn.tensor import Tensor, Dim
from .dtypes import is_float
from .policy import scope

__all__ = [
    "cross_entropy",
    "ctc_loss",
    "float32",
    "in_float32",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "reduce_logsumexp",
    "region",
    "scope",
    "softmax",
]

_Func = TypeVar("_Func", bound=Callable)


def float32(x: Tensor) -> Tensor:
    """
    :param x: any dtype
    :return: x in at least float32: float64, integers and bool pass as they are
    """
    from .hooks.loss import widen

    return widen(x)


def region() -> ContextManager:
    """
    :return: context with autocast off: there, what is float32 stays float32, also in a matmul
    """
    from .ops.fuse import autocast_off

    stack = contextlib.ExitStack()
    for device in ("cpu", "cuda"):
        stack.enter_context(autocast_off(device))
    return stack


def in_float32(func: _Func) -> _Func:
    """
    Decorator: func gets all floating :class:`Tensor` (and raw torch tensors) among its arguments, nested ones too,
    in at least float32, and runs without autocast. Everything else is passed as it is.

    :param func: e.g. a loss function
    """
    import tree

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree.map_structure(_widen_any, (args, kwargs))
        with region():
            return func(*args, **kwargs)

    return wrapper


def _widen_any(x: Any) -> Any:
    import torch

    if isinstance(x, torch.Tensor):
        return x.to(torch.promote_types(x.dtype, torch.float32)) if x.dtype.is_floating_point else x
    return float32(x) if isinstance(x, Tensor) else x


def _check(func: str, x: Tensor, axis: Union[Dim, Sequence[Dim]] = ()):
    if not isinstance(x, Tensor):
        raise TypeError(f"rf.upcast.{func}: expected a RETURNN Tensor, got {type(x).__module__}.{type(x).__name__}")
    if not is_float(x.dtype):
        raise TypeError(f"rf.upcast.{func}: expected a tensor of a float dtype, got {x.dtype} ({x})")
    for dim in [axis] if isinstance(axis, Dim) else axis:
        if dim not in x.dims:
            raise ValueError(f"rf.upcast.{func}: axis {dim} is not in {x}, which has {', '.join(map(str, x.dims))}")


def log_softmax(a: Tensor, *, axis: Dim, use_mask: bool = True) -> Tensor:
    """
    :param a: logits, any float dtype
    :param axis: in a
    :param use_mask: see :func:`rf.log_softmax`
    :return: :func:`rf.log_softmax` in at least float32; keep it so through all that follows
    """
    _check("log_softmax", a, axis)
    with region():
        return rf.log_softmax(float32(a), axis=axis, use_mask=use_mask)


def softmax(a: Tensor, *, axis: Dim, use_mask: bool = True) -> Tensor:
    """
    :param a: logits, any float dtype
    :param axis: in a
    :param use_mask: see :func:`rf.softmax`
    :return: :func:`rf.softmax` in at least float32
    """
    _check("softmax", a, axis)
    with region():
        return rf.softmax(float32(a), axis=axis, use_mask=use_mask)


def reduce_logsumexp(source: Tensor, *, axis: Union[Dim, Sequence[Dim]], use_mask: bool = True) -> Tensor:
    """
    :param source: any float dtype
    :param axis: in source
    :param use_mask: see :func:`rf.reduce_logsumexp`
    :return: :func:`rf.reduce_logsumexp` in at least float32
    """
    _check("reduce_logsumexp", source, axis)
    with region():
        return rf.reduce_logsumexp(float32(source), axis=axis, use_mask=use_mask)


def cross_entropy(*, estimated: Tensor, target: Tensor, axis: Dim, estimated_type: str) -> Tensor:
    """
    :param estimated: probs, log-probs or logits, any float dtype. Of logits, no float32 copy is kept
    :param target: sparse, or probs of any float dtype
    :param axis: the labels, in estimated
    :param estimated_type: "probs", "log-probs" or "logits"
    :return: :func:`rf.cross_entropy` in at least float32
    """
    from .hooks import loss

    _check("cross_entropy", estimated, axis)
    if estimated_type not in ("probs", "log-probs", "logits"):
        raise ValueError(
            f"rf.upcast.cross_entropy: estimated_type must be probs, log-probs or logits, got {estimated_type!r}"
        )
    kwargs = dict(estimated=estimated, target=target, axis=axis, estimated_type=estimated_type)
    with region():
        if estimated_type != "logits":
            return loss.cross_entropy_float32(rf.cross_entropy, **kwargs)
        wide = lambda **_: rf.cross_entropy(**{**kwargs, "estimated": float32(estimated), "target": float32(target)})
        return loss.cross_entropy_with_logits(wide, logits=estimated, targets=target, axis=axis)


def ctc_loss(*, logits: Tensor, logits_normalized: bool = False, **kwargs: Any) -> Tensor:
    """
    :param logits: [B..., input_spatial, C], any float dtype
    :param logits_normalized: they are log-probs
    :param kwargs: targets, input_spatial_dim, targets_spatial_dim, blank_index, max_approx, use_native_op, label_loop,
        see :func:`rf.ctc_loss`
    :return: [B...], :func:`rf.ctc_loss` in at least float32, log_softmax included
    """
    from .hooks import loss
    from .hooks.common import is_torch

    _check("ctc_loss", logits)
    original = lambda **kwargs_: logits._raw_backend.ctc_loss(**kwargs_)
    with region():
        if is_torch(logits):
            return loss.ctc_loss(original, logits=logits, logits_normalized=logits_normalized, **kwargs)
        return original(logits=float32(logits), logits_normalized=logits_normalized, **kwargs)


def _linear_operands(func: str, module: rf.Linear, x: Tensor):
    from .hooks.common import autocast_dtype

    if not isinstance(module, rf.Linear):
        raise TypeError(f"rf.upcast.{func}: expected an rf.Linear, got {type(module).__name__}")
    _check(func, x, module.in_dim)
    rest = [d for d in x.dims if d != module.in_dim]
    raw, weight = x.copy_compatible_to_dims_raw([*rest, module.in_dim]), module.weight.raw_tensor
    dtype = autocast_dtype(x)
    if dtype is not None and x.dtype != "float64":
        raw, weight = raw.to(dtype), weight.to(dtype)
    return rest, raw, weight, module.bias.raw_tensor if module.bias is not None else None


def linear(module: rf.Linear, x: Tensor) -> Tensor:
    """
    For final logits.

    :param module: its weight and bias are used
    :param x: [..., in_dim], any float dtype
    :return: [..., out_dim], the product of the operands as they are (under autocast: rounded to its dtype, as always),
        accumulated and returned in at least float32, the bias added in float32
    """
    from .hooks.common import is_packed
    from .ops import linear_loss

    if isinstance(x, Tensor) and is_packed(x):
        return x.raw_tensor.rewrap(linear(module, x.raw_tensor.inner), name="linear")
    rest, raw, weight, bias = _linear_operands("linear", module, x)
    out_raw = linear_loss.linear_f32(raw, weight, bias)
    out = Tensor("linear", dims=[*rest, module.out_dim], dtype=str(out_raw.dtype).split(".")[1])
    out.raw_tensor = out_raw
    out.feature_dim = module.out_dim
    return out


def linear_cross_entropy(
    linear: rf.Linear, x: Tensor, *, target: Tensor, label_smoothing: float = 0.0, float32_logits: bool = False
) -> Tensor:
    """
    Final projection and cross entropy in chunks: the logits never exist as a whole.

    :param linear: to the labels
    :param x: [..., in_dim], any float dtype
    :param target: [...], sparse over ``linear.out_dim``, with the dims of x without in_dim
    :param label_smoothing: that much of the target is spread evenly over all labels
    :param float32_logits: the logits of a chunk are not rounded; else as ``linear(x)`` rounds them
    :return: [...], at least float32. Loss and gradients in float32 arithmetic
    """
    from .hooks.common import is_packed
    from .ops import linear_loss

    name = "linear_cross_entropy"
    if target.sparse_dim != getattr(linear, "out_dim", None):
        raise ValueError(f"rf.upcast.{name}: target {target} must be sparse over the labels {linear.out_dim}")
    if isinstance(x, Tensor) and is_packed(x):
        return _packed_linear_cross_entropy(linear, x, target, label_smoothing, float32_logits)
    rest, raw, weight, bias = _linear_operands(name, linear, x)
    if set(rest) != target.dims_set:
        raise ValueError(f"rf.upcast.{name}: target {target} must have the dims of {x} without {linear.in_dim}")
    raw_target = target.copy_compatible_to_dims_raw(rest).long()
    out_raw = linear_loss.linear_cross_entropy(
        raw, weight, bias, raw_target, label_smoothing=label_smoothing, float32_logits=float32_logits
    )
    out = Tensor(name, dims=rest, dtype=str(out_raw.dtype).split(".")[1])
    out.raw_tensor = out_raw
    return out


def _packed_linear_cross_entropy(module, x: Tensor, target: Tensor, label_smoothing: float, float32_logits: bool):
    from .hooks.common import is_packed

    raw = x.raw_tensor
    target = rf.unpack(target) if is_packed(target) else target
    kwargs = dict(label_smoothing=label_smoothing, float32_logits=float32_logits)
    if getattr(raw, "layout_lens", None) is not None:  # a layout that rf.pack can't make
        return linear_cross_entropy(module, rf.unpack(x), target=target, **kwargs)
    target = rf.pack(target, dims=raw.orig_dims, out_dim=raw.packed_dim, gap=raw.gap, align=raw.align)
    loss = linear_cross_entropy(module, raw.inner, target=target.raw_tensor.inner, **kwargs)
    return raw.rewrap(loss, name="linear_cross_entropy")
