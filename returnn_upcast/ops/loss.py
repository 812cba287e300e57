"""
Cross entropy and log_softmax in float32.

Logits are the largest tensors of a model, so neither a float32 copy of them nor of their log-probs is kept:
one pass over the low-precision logits gives two float32 numbers per row, another gives the gradient from these,
rounded once. See :mod:`.loss_rows` for the passes.
"""

from __future__ import annotations
from typing import Any, Callable, Tuple
import math
import torch
import torch.nn.functional as F
from .fuse import autocast_off, differentiate, may_fuse
from .loss_rows import (
    dense_backward,
    dense_backward_log_probs,
    dense_backward_target,
    dense_forward,
    label_log_prob,
    log_softmax_backward,
    log_softmax_forward,
    row_stats,
    softmax_times,
    wide_dtype,
)

IGNORE_INDEX = -100  # as in F.cross_entropy


def _plain_cross_entropy(logits: torch.Tensor, target: torch.Tensor, axis: int = 1) -> torch.Tensor:
    dense = target.is_floating_point()
    if logits.ndim > 1:  # batch first, then labels
        logits, target = logits.movedim(axis, 1), target.movedim(axis, 1) if dense else target
    with autocast_off(logits.device.type):
        target = target.to(wide_dtype(target)) if dense else target
        return F.cross_entropy(logits.to(wide_dtype(logits)), target, reduction="none")


def _plain_dot(log_probs: torch.Tensor, target: torch.Tensor, axis: int = 1) -> torch.Tensor:
    wide = wide_dtype(log_probs, target)
    with autocast_off(log_probs.device.type):
        return -(target.to(wide) * log_probs.to(wide)).sum(axis)


class _Sparse(torch.autograd.Function):
    """Cross entropy of rows of logits and labels."""

    @staticmethod
    def forward(ctx, rows, target):
        ignored = target == IGNORE_INDEX
        peak, log_sum = row_stats(rows)
        ctx.save_for_backward(rows, target, peak, log_sum)
        return -label_log_prob(rows, target.masked_fill(ignored, 0), peak, log_sum).masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx, grad):
        rows, target, peak, log_sum = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiate(_plain_cross_entropy, (rows, target), grad)
        ignored = target == IGNORE_INDEX
        target, grad = target.masked_fill(ignored, 0), grad.masked_fill(ignored, 0)
        result = softmax_times(rows, peak, log_sum, grad, rows.dtype)
        # expm1: p - 1 of a confident row keeps its digits
        at_target = label_log_prob(rows, target, peak, log_sum).expm1() * grad
        return result.scatter_(1, target.unsqueeze(1), at_target.unsqueeze(1).to(rows.dtype)), None


class _Dense(torch.autograd.Function):
    """Cross entropy of rows and dense targets. Normalized rows are log-probs: logits without the softmax's part."""

    @staticmethod
    def forward(ctx, rows, target, normalized):
        none = rows.select(1, 0).new_zeros((), dtype=wide_dtype(rows, target)).expand_as(rows.select(1, 0))
        peak, log_sum = (none, none) if normalized else (stat.to(none.dtype) for stat in row_stats(rows))
        loss, total = dense_forward(rows, target, peak, log_sum)
        ctx.save_for_backward(rows, target, peak, log_sum, none if normalized else total)
        ctx.normalized = normalized
        return loss

    @staticmethod
    def backward(ctx, grad):
        rows, target, peak, log_sum, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = _plain_dot if ctx.normalized else _plain_cross_entropy
            return (*differentiate(plain, (rows, target), grad), None)
        need_rows, need_target, _ = ctx.needs_input_grad
        grad = grad.contiguous()  # from a sum, it comes expanded: one more layout to compile for
        d_rows = None
        if need_rows and ctx.normalized:
            d_rows = dense_backward_log_probs(target, grad, rows.dtype)
        elif need_rows:
            d_rows = dense_backward(rows, target, peak, log_sum, total, grad)
        d_target = dense_backward_target(rows, target, peak, log_sum, grad) if need_target else None
        return d_rows, d_target, None


class _LogSoftmax(torch.autograd.Function):
    """Over the last of 2 or 3 axes, contiguous. Keeps its result only, which the CTC kernel keeps as well."""

    @staticmethod
    def forward(ctx, x, ctc):
        ctx.dtype, ctx.swapped, ctx.ctc = x.dtype, x.stride(0) < x.stride(-2), ctc
        log_probs = log_softmax_forward(x)
        ctx.save_for_backward(log_probs)
        return log_probs

    @staticmethod
    def backward(ctx, grad):
        (log_probs,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            grad = torch.where(log_probs == -math.inf, 0.0, grad) if ctx.ctc else grad
            return (grad - log_probs.exp() * grad.sum(-1, keepdim=True)).to(ctx.dtype), None
        if ctx.swapped:  # so that the gradient has the memory layout of x
            log_probs, grad = log_probs.transpose(0, 1), grad.transpose(0, 1)
        result = log_softmax_backward(log_probs, grad, ctx.ctc, ctx.dtype)
        return result.transpose(0, 1) if ctx.swapped else result, None


def _on_rows(func: Callable, x: torch.Tensor, target: torch.Tensor, axis: int, *args: Any) -> torch.Tensor:
    """:return: func on rows of x and the target with its dims likewise, back in the dim order of x"""
    order = sorted(range(x.ndim), key=lambda i: -x.stride(i))  # stable: that of a contiguous x stays
    position, sizes = order.index(axis), [x.shape[i] for i in order]
    before, after = sizes[:position], sizes[position + 1 :]
    outer = [i - (i > axis) for i in order if i != axis]
    shape = [math.prod(before), x.shape[axis]] + ([math.prod(after)] if math.prod(after) != 1 else [])
    dense = target.is_floating_point()
    target = target.permute(order if dense else outer).reshape(shape if dense else shape[:1] + shape[2:])
    loss = func(x.permute(order).reshape(shape), target, *args).reshape(before + after)
    return loss.permute([outer.index(i) for i in range(len(outer))])


def _check(name: str, x: torch.Tensor, target: torch.Tensor, axis: int) -> Tuple[int, torch.Tensor]:
    """:return: axis, not negative, and target, int64 if it is sparse; errors for what does not fit"""
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"{name}: axis {axis} is not one of the {x.ndim} axes of shape {tuple(x.shape)}")
    axis, dense = axis % x.ndim, target.is_floating_point()
    want = x.shape if dense else x.shape[:axis] + x.shape[axis + 1 :]
    if target.shape != want:
        kind = "dense" if dense else "sparse"
        raise ValueError(f"{name}: {kind} target has shape {tuple(target.shape)}, but must have {tuple(want)}")
    if not dense and may_fuse(x, target):
        check_labels(name, target, x.shape[axis])
    return axis, target if dense else target.long()


def check_labels(name: str, target: torch.Tensor, num_labels: int):
    """:raise IndexError: as F.cross_entropy does for labels out of range; on the CPU only, a GPU would have to wait"""
    if target.device.type == "cpu":
        bad = target[((target < 0) | (target >= num_labels)) & (target != IGNORE_INDEX)]
        if bad.numel() > 0:
            allowed = f"allowed are 0 to {num_labels - 1}, and {IGNORE_INDEX} to ignore a row"
            raise IndexError(f"{name}: target {bad[0].item()} is out of bounds, {allowed}")


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, *, axis: int) -> torch.Tensor:
    """
    Cross entropy, ``F.cross_entropy(..., reduction="none")`` in float32, with NaN and inf where that has them.

    :param logits: any float dtype, label axis anywhere
    :param target: integer labels, of the shape of logits without axis; -100 for loss and gradient 0.
        Or probabilities, of the shape of logits, any float dtype; their gradient is in that.
    :param axis: label axis of logits
    :return: loss, of the shape of logits without axis, at least float32, nothing rounded on the way to it.
        The gradient is rounded once, to the dtype of the logits; kept for it are the logits and two numbers per row.
    :raise IndexError: for labels out of range (CPU; a device assertion elsewhere) or a wrong axis
    """
    axis, target = _check("cross_entropy", logits, target, axis)
    if not may_fuse(logits, target) or wide_dtype(logits) == logits.dtype:
        return _plain_cross_entropy(logits, target, axis)
    if target.is_floating_point():
        return _on_rows(_Dense.apply, logits, target, axis, False)
    return _on_rows(_Sparse.apply, logits, target, axis)


def nll_from_log_probs(log_probs: torch.Tensor, target: torch.Tensor, *, axis: int) -> torch.Tensor:
    """
    Negative log-likelihood. No matmul, which autocast would cast down, and nothing is rounded.

    :param log_probs: any float dtype, label axis anywhere
    :param target: as for :func:`cross_entropy`
    :param axis: label axis of log_probs
    :return: loss, of the shape of log_probs without axis, at least float32; gradients in the dtypes of the inputs
    :raise IndexError: for labels out of range (CPU) or a wrong axis
    """
    axis, target = _check("nll_from_log_probs", log_probs, target, axis)
    if not target.is_floating_point():
        ignored = target == IGNORE_INDEX
        picked = log_probs.gather(axis, target.masked_fill(ignored, 0).unsqueeze(axis)).squeeze(axis)
        return -picked.to(wide_dtype(log_probs)).masked_fill(ignored, 0)
    if may_fuse(log_probs, target):
        return _on_rows(_Dense.apply, log_probs, target, axis, True)
    return _plain_dot(log_probs, target, axis)


def log_softmax(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    """
    :param x: any float dtype, any shape
    :param axis: to normalise over
    :return: log_softmax of the shape of x, computed and returned in at least float32; only that is kept for backward.
        The gradient is rounded once, to x.dtype.
    """
    if may_fuse(x) and wide_dtype(x) != x.dtype and x.numel() > 0:
        rows = x.movedim(axis, -1)  # copied if they are not so in memory, but that is not kept
        return _LogSoftmax.apply(rows.reshape(-1, x.shape[axis]), False).reshape(rows.shape).movedim(-1, axis)
    with autocast_off(x.device.type):
        return x.to(wide_dtype(x)).log_softmax(axis)


def ctc_log_probs(logits: torch.Tensor) -> torch.Tensor:
    """
    :param logits: [T, B, C], any float dtype, in any memory layout
    :return: log_softmax over C, [T, B, C], contiguous, as ``F.ctc_loss`` wants it, in at least float32,
        written once; only that is kept for backward. The gradient is rounded once, in dtype and layout of the logits.
    """
    if logits.ndim != 3:
        raise ValueError(f"ctc_log_probs: logits must be [T, B, C], got shape {tuple(logits.shape)}")
    if may_fuse(logits) and wide_dtype(logits) != logits.dtype:
        return _LogSoftmax.apply(logits, True)
    return no_gradient_at_zero(log_softmax(logits, axis=-1).contiguous())


def no_gradient_at_zero(log_probs: torch.Tensor) -> torch.Tensor:
    """
    :param log_probs: for ``F.ctc_loss``, which has NaN as gradient of -inf, where it is 0: no path goes there
    :return: the same, what is -inf gets no gradient
    """
    return torch.where(log_probs == -math.inf, log_probs.detach(), log_probs)
