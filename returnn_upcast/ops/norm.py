"""
Normalisation over any axes, float32 inside: layer, RMS, group and batch norm are this one function.

The mean is taken first and the variance of what is left (two passes): E[x²] - E[x]² cancels when the mean dominates.
For backward, the input is kept as it is, with the float32 statistics.
"""

from __future__ import annotations
from typing import Optional, Sequence, Tuple
import functools
import torch
from . import rows_native
from .fuse import autocast_off, compiled, differentiate, may_fuse, needs_grad

_Stats = Tuple[Optional[torch.Tensor], torch.Tensor]


def normalize(
    x: torch.Tensor,
    *,
    axes: Sequence[int],
    scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    mask: Optional[torch.Tensor] = None,
    eps: float,
    center: bool = True,
    out_dtype: Optional[torch.dtype] = None,
    stats: Optional[_Stats] = None,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor]:
    """
    :param x: any shape, any float dtype
    :param axes: the statistics are taken over these
    :param scale: broadcastable to x, with as many axes; any float dtype
    :param bias: the same
    :param mask: bool, broadcastable to x, with as many axes: only elements where it is True count for the statistics
    :param eps: added to the variance
    :param center: subtract the mean; without it, the mean square takes the place of the variance (RMS norm)
    :param out_dtype: default x.dtype
    :param stats: mean and variance to use instead of those of x, broadcastable to x (batch norm in evaluation)
    :return: (x - mean) / sqrt(variance + eps) * scale + bias, in the shape of x and out_dtype, computed in at least
        float32 and rounded once; and mean (None without center) and biased variance in at least float32, without
        gradient, axes kept as 1
    """
    axes = tuple(sorted(axis % x.ndim for axis in axes))
    out_dtype = out_dtype or x.dtype
    with autocast_off(x.device.type):
        if stats is not None:
            mean, var = _wide(stats[0]), _wide(stats[1])
            return _apply(x, scale, bias, mean, torch.rsqrt(var + eps), out_dtype), mean, var
        fuse, grad = may_fuse(x, scale, bias, mask), needs_grad(x, scale, bias)
        run = _plain if not fuse else _Normalize.apply if grad else _forward
        return run(x, scale, bias, mask, axes, eps, center, out_dtype)[:3]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype.itemsize >= 4 else x.to(torch.float32)


def _wide_or_none(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if x is None else _wide(x)


def _stats(x: torch.Tensor, mask: Optional[torch.Tensor], axes: Tuple[int, ...], center: bool) -> _Stats:
    average = _average if mask is None else functools.partial(_masked_average, mask=mask, count=_count(x, mask, axes))
    mean = average(x, axes) if center else None
    return mean, average((x - mean if center else x).square(), axes)


def _average(x: torch.Tensor, axes: Tuple[int, ...]) -> torch.Tensor:
    return x.mean(axes, keepdim=True)


def _masked_average(x: torch.Tensor, axes: Tuple[int, ...], *, mask: torch.Tensor, count) -> torch.Tensor:
    return torch.where(mask, x, 0.0).sum(axes, keepdim=True) / count


def _count(x: torch.Tensor, mask: torch.Tensor, axes: Tuple[int, ...]) -> torch.Tensor:
    count = mask.to(x.dtype).sum(axes, keepdim=True)
    for axis in axes:
        size = mask.shape[axis]
        if isinstance(size, int) and size == 1:  # in a trace, a symbolic size may stand for the longest sequence
            count = count * x.shape[axis]
    return count.clamp(min=1.0)  # a row without any element would give 0/0


def _apply(x, scale, bias, mean, rstd, out_dtype: torch.dtype) -> torch.Tensor:
    out = _wide(x)
    if mean is not None:
        out = out - mean
    out = out * rstd
    if scale is not None:
        out = out * scale
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)


def _plain(x, scale, bias, mask, axes: Tuple[int, ...], eps: float, center: bool, out_dtype: torch.dtype):
    # Widened once, so that the parts of its gradient are added in float32 and rounded once.
    x = _wide(x)
    mean, var = _stats(x, mask, axes, center)
    # A result, so that it is computed once per row: inside of a loop over features it would be once per vector.
    rstd = torch.rsqrt(var + eps)
    out = _apply(x, scale, bias, mean, rstd, out_dtype)
    return out, mean.detach() if center else None, var.detach(), rstd.detach()


def _plain_backward(grad, x, scale, mask, mean, rstd, axes: Tuple[int, ...], dims: Tuple):
    """
    :param dims: over which axes the gradients of scale and bias are summed, None where there is none
    :return: gradients of x, scale, bias, the last two in at least float32
    """
    grad = _wide(grad)
    norm = (_wide(x) - mean if mean is not None else _wide(x)) * rstd
    grad_scale = _sum(grad * norm, dims[0]) if dims[0] is not None else None
    grad_bias = _sum(grad, dims[1]) if dims[1] is not None else None
    if scale is not None:
        grad = grad * scale
    # The statistics come from the elements inside the mask, but all elements depend on them.
    count = None if mask is None else _count(norm, mask, axes)
    average = lambda t: t.mean(axes, keepdim=True) if mask is None else t.sum(axes, keepdim=True) / count
    inner = norm * average(grad * norm)
    if mean is not None:
        inner = inner + average(grad)
    if mask is not None:
        inner = torch.where(mask, inner, 0.0)
    return (rstd * (grad - inner)).to(x.dtype), grad_scale, grad_bias


def _sum(x: torch.Tensor, dims: Tuple[int, ...]) -> torch.Tensor:
    # One axis after the other, the last one first: the partial sums run over what is near in memory.
    for dim in reversed(dims):
        x = x.sum(dim, keepdim=True)
    return x


_compiled_forward, _compiled_backward = compiled(_plain), compiled(_plain_backward)


def _is_native(x, scale, bias, mask, axes: Tuple[int, ...], out_dtype: torch.dtype) -> bool:
    """:return: whether :mod:`.rows_native` does this"""
    over_rows = mask is None and axes == (x.ndim - 1,) and out_dtype in (x.dtype, torch.float32)
    return (
        over_rows and all(rows_native.may_be_parameter(p, x) for p in (scale, bias)) and rows_native.may_run(x.dtype, x)
    )


def _forward(x, scale, bias, mask, axes: Tuple[int, ...], eps: float, center: bool, out_dtype: torch.dtype):
    if _is_native(x, scale, bias, mask, axes, out_dtype):
        return rows_native.norm_forward(x, scale, bias, eps, center, out_dtype)
    # Parameters are small: widened here, one compiled kernel serves all their dtypes.
    return _compiled_forward(x, *map(_wide_or_none, (scale, bias)), mask, axes, eps, center, out_dtype)


def _backward(grad, x, scale, bias, mask, mean, rstd, axes: Tuple[int, ...], needed: Sequence[bool]):
    """:return: gradients of x, and of scale and bias where needed, these in at least float32"""
    if _is_native(x, scale, bias, mask, axes, grad.dtype):
        return rows_native.norm_backward(grad, x, scale, mean, rstd, *needed)
    dims = tuple(_summed(x, p) if need else None for p, need in zip((scale, bias), needed))
    return _compiled_backward(grad, x, _wide_or_none(scale), mask, mean, rstd, axes, dims)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, bias, mask, axes, eps, center, out_dtype):
        out, mean, var, rstd = _forward(x, scale, bias, mask, axes, eps, center, out_dtype)
        ctx.save_for_backward(x, scale, bias, mask, mean, rstd)
        ctx.args = (axes, eps, center, out_dtype)
        ctx.mark_non_differentiable(*(t for t in (mean, var) if t is not None))
        return out, mean, var

    @staticmethod
    def backward(ctx, grad, _grad_mean, _grad_var):
        x, scale, bias, mask, mean, rstd = ctx.saved_tensors
        axes, eps, center, out_dtype = ctx.args
        with autocast_off(x.device.type):
            if torch.is_grad_enabled():
                plain = lambda *args: _plain(*args, mask, axes, eps, center, out_dtype)[0]
                return *differentiate(plain, (x, scale, bias), grad), *(None,) * 5
            needed = ctx.needs_input_grad[1:3]
            grad_x, *grads = _backward(grad, x, scale, bias, mask, mean, rstd, axes, needed)
        grads = [None if g is None else g.to(p.dtype) for g, p in zip(grads, (scale, bias))]
        return grad_x, *grads, *(None,) * 5


def _summed(x: torch.Tensor, param: torch.Tensor) -> Tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if param.shape[i] == 1 and x.shape[i] != 1)
