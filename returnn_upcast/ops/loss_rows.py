"""
Kernels of softmax and cross entropy, row by row, in float32.

Rows are [A, V] or [A, V, C], label axis 1, the dims in their order in memory, so that no dim order costs a copy.
What belongs to a row is then [A] or [A, C]: the peak, and log_sum, the log of the sum of exp(x - peak).
"""

from __future__ import annotations
from typing import Any, Callable, Tuple
import functools
import itertools
import math
import torch
from . import rows_native
from .fuse import autocast_off, compiled

_BLOCK_NUMEL = 1 << 20  # of the float32 temporaries where nothing is compiled


def wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """:return: the dtype to compute in: at least float32, and not narrower than any of the tensors"""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def row_kernel(func: Callable) -> Callable:
    """
    :param func: of rows and of other tensors with the same first and last dim, as are its results; and of dtypes
    :return: func, compiled where that pays, else in blocks of rows, as its temporaries are float32
    """

    @functools.wraps(func)
    def in_blocks(rows: torch.Tensor, *args: Any) -> Any:
        if torch.compiler.is_compiling() or rows.numel() <= _BLOCK_NUMEL:
            return func(rows, *args)
        dim = 0 if rows.ndim == 2 or rows.shape[0] >= rows.shape[-1] else -1
        size = max(1, _BLOCK_NUMEL * rows.shape[dim] // rows.numel())
        blocks = [t.split(size, dim) if isinstance(t, torch.Tensor) else itertools.repeat(t) for t in (rows, *args)]
        parts = [func(*block) for block in zip(*blocks)]
        if isinstance(parts[0], tuple):
            return tuple(torch.cat(results, dim) for results in zip(*parts))
        return torch.cat(parts, dim)

    fast = compiled(in_blocks)

    @functools.wraps(func)
    def call(rows: torch.Tensor, *args: Any) -> Any:
        # detached and without autocast, as the compiler would specialise on both
        with autocast_off(rows.device.type):
            return fast(*(t.detach() if isinstance(t, torch.Tensor) else t for t in (rows, *args)))

    return call


def _sum(wide: torch.Tensor, in_float64: bool) -> torch.Tensor:
    return wide.sum(1, keepdim=True, dtype=torch.float64 if in_float64 else wide.dtype).to(wide.dtype)


def _needs_float64(rows: torch.Tensor) -> bool:
    """
    :return: whether a float32 sum over the labels may lose digits. Compiled for the CPU, it is one addition after the
        other, if not for 16 labels at a time where they are next to each other in memory. A GPU adds in a tree.
    """
    return rows.device.type == "cpu" and (rows.stride(1) != 1 or rows.shape[1] > 65536)


def _log_sum(wide: torch.Tensor, in_float64: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """:return: peak and log_sum, axis 1 kept; NaN where log_softmax is NaN"""
    peak = wide.amax(1, keepdim=True)
    # log1p of the sum without the peak's own 1: a confident row has a loss far below the spacing of floats at 1
    at_peak = (wide == peak).to(wide.dtype)
    rest = _sum((wide - peak).exp() - at_peak, in_float64)
    return peak, (rest + (at_peak.sum(1, keepdim=True) - 1)).log1p()


def _log_probs(rows: torch.Tensor, peak: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    # not x - (peak + log_sum), which would round at the magnitude of the logits, and the loss with it
    return (rows.to(peak.dtype) - peak.unsqueeze(1)) - log_sum.unsqueeze(1)


@row_kernel
def row_stats(rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """:return: peak and log_sum per row, in the wide dtype"""
    peak, log_sum = _log_sum(rows.to(wide_dtype(rows)), _needs_float64(rows))
    return peak.squeeze(1), log_sum.squeeze(1)


@row_kernel
def mean_log_prob(rows, peak, log_sum) -> torch.Tensor:
    """:return: mean of the log-probs per row"""
    return (_sum(_log_probs(rows, peak, log_sum), rows.device.type == "cpu") / rows.shape[1]).squeeze(1)


@row_kernel
def softmax_times(rows, peak, log_sum, grad, dtype) -> torch.Tensor:
    """:return: softmax * grad in dtype: the gradient of a sparse cross entropy, but for the entry of the target"""
    return (_log_probs(rows, peak, log_sum).exp() * grad.unsqueeze(1)).to(dtype)


@row_kernel
def dense_forward(rows, target, peak, log_sum):
    """:return: -sum(target * log_probs), sum(target), per row"""
    target = target.to(peak.dtype)
    on_cpu = rows.device.type == "cpu"  # where it is needed more often: the terms differ in magnitude
    loss = -_sum(target * _log_probs(rows, peak, log_sum), on_cpu)
    return loss.squeeze(1), _sum(target, on_cpu).squeeze(1)


@row_kernel
def dense_backward(rows, target, peak, log_sum, total, grad):
    """:return: gradient of the rows, in their dtype"""
    softmax = _log_probs(rows, peak, log_sum).exp()
    return ((softmax * total.unsqueeze(1) - target) * grad.unsqueeze(1)).to(rows.dtype)


@row_kernel
def dense_backward_log_probs(target, grad, dtype):
    """
    :return: gradient of log-probs in dtype. It does not depend on them: no 0 * exp(log_probs), which is NaN for inf
    """
    return (target.to(grad.dtype) * -grad.unsqueeze(1)).to(dtype)


@row_kernel
def dense_backward_target(rows, target, peak, log_sum, grad):
    """:return: gradient of the dense target, in its dtype"""
    return (_log_probs(rows, peak, log_sum) * -grad.unsqueeze(1)).to(target.dtype)


def _labels_last(rows: torch.Tensor) -> torch.Tensor:
    """:return: the same rows, in memory as [A, C, V]"""
    return rows.transpose(1, -1).contiguous().transpose(1, -1)


@row_kernel
def _compiled_log_softmax(rows, dtype):
    wide = rows.to(dtype)
    peak, log_sum = _log_sum(wide, _needs_float64(rows))
    return _labels_last((wide - peak) - log_sum)


@row_kernel
def _compiled_log_softmax_backward(log_probs, grad, ctc, dtype):
    grad = torch.where(log_probs == -math.inf, 0.0, grad) if ctc else grad
    return _labels_last((grad - log_probs.exp() * grad.sum(1, keepdim=True)).to(dtype))


def log_softmax_forward(x: torch.Tensor) -> torch.Tensor:
    """:return: log_softmax over the last of 2 or 3 axes, which is the last in memory; contiguous, in the wide dtype"""
    if rows_native.may_run(x.dtype, x):
        return rows_native.log_softmax_forward(x)
    # contiguous unless the kernel ran in blocks
    return _compiled_log_softmax(x.transpose(1, -1), wide_dtype(x)).transpose(1, -1).contiguous()


def log_softmax_backward(log_probs: torch.Tensor, grad: torch.Tensor, ctc: bool, dtype: torch.dtype) -> torch.Tensor:
    """
    :return: gradient of the input in dtype, the last axis is the last in memory; for ctc, see
        :func:`.loss.no_gradient_at_zero`
    """
    if rows_native.may_run(dtype, log_probs, grad):
        return rows_native.log_softmax_backward(log_probs, grad, ctc, dtype)
    rows = log_probs.transpose(1, -1), grad.transpose(1, -1)
    return _compiled_log_softmax_backward(*rows, ctc, dtype).transpose(1, -1)


def label_log_prob(rows, target, peak, log_sum) -> torch.Tensor:
    """:return: log-prob of the target, which is in range, per row"""
    return _log_probs(rows.gather(1, target.unsqueeze(1)), peak, log_sum).squeeze(1)
