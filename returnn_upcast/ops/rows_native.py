"""
Norms and log_softmax over the last axis, on the CPU in bf16 and f16, as C++ code with float32 inside.

Why not compiled by ``torch.compile`` as elsewhere: that code waits for one addition after the other, and each call
checks guards. (Measured on Zen 4 with 2 threads, LayerNorm, [16, 300, 512], caches cold: forward 1.0 ms against 1.1 ms,
backward 1.4 ms against 1.8 ms; for less than 32,768 elements, the ops of torch one by one take longer still.)

Where it can't be compiled, see :mod:`.native`, or where the axis is not the last one in memory, the callers have the
same in torch's ops.
"""

from __future__ import annotations
from typing import List, Optional, Tuple
import ctypes
import torch
from .native import Function, is_readable

MIN_NUMEL = 4096  # with less, nobody waits for a compiler

_LOW = (torch.bfloat16, torch.float16)
_GRAIN = 32_768  # elements that another thread is worth
_NORM_FORWARD, _NORM_BACKWARD, _LOG_SOFTMAX_FORWARD, _LOG_SOFTMAX_BACKWARD = range(4)  # as in the source


def may_run(low: torch.dtype, *tensors: torch.Tensor) -> bool:
    """
    :param low: dtype of the input of the op
    :param tensors: what it reads along the last axis, all of one shape, in that dtype or in float32
    :return: whether the native code can go over these, and is there; compiles it if not done yet
    """
    if low not in _LOW or tensors[0].numel() < MIN_NUMEL:
        return False
    for x in tensors:
        if x.dtype not in (low, torch.float32) or not _is_in_rows(x):
            return False
    return function.is_available()


def _is_in_rows(x: torch.Tensor) -> bool:
    return (x.is_contiguous() or (x.ndim <= 3 and x.stride(-1) == 1)) and is_readable(x)


def may_be_parameter(param: Optional[torch.Tensor], x: torch.Tensor) -> bool:
    """
    :param param: scale or bias, with as many axes as x
    :param x: input of the norm
    :return: whether it has one float, of at most 32 bit, for each element of a row
    """
    return param is None or (
        param.shape[-1] == param.numel() == x.shape[-1] and param.dtype.itemsize <= 4 and is_readable(param)
    )


def norm_forward(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    center: bool,
    out_dtype: torch.dtype,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """
    :param x: any shape that :func:`may_run` takes
    :param scale: for which :func:`may_be_parameter`
    :param bias: the same
    :param eps: added to the variance
    :param center: subtract the mean
    :param out_dtype: that of x, or float32
    :return: result, mean (None without center), biased variance, 1 / sqrt(variance + eps); these in float32, last axis 1
    """
    out = _empty_rows(x, out_dtype)
    mean, var, rstd = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(3))
    mean = mean if center else None
    scale, bias = _vector(scale), _vector(bias)
    _call(_NORM_FORWARD, x, None, out, scale, bias, mean, var, rstd, low=x, wide=out, flag=center, eps=eps)
    return out, mean, var, rstd


def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    mean: Optional[torch.Tensor],
    rstd: torch.Tensor,
    need_scale: bool,
    need_bias: bool,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """
    :param grad: of the result, in that dtype
    :param x: as for :func:`norm_forward`
    :param scale:
    :param mean: float32, last axis 1; None for a norm without
    :param rstd: the same
    :param need_scale:
    :param need_bias:
    :return: gradients of x in its dtype, of scale and bias in float64, with as many axes as x
    """
    out = _empty_rows(x, x.dtype)
    if not _is_in_rows(grad):  # from a sum, say, it comes expanded
        grad = grad.clone(memory_format=torch.contiguous_format)
    shape = (_workers(x), x.shape[-1])
    sums = [x.new_zeros(shape, dtype=torch.float64) if need else None for need in (need_scale, need_bias)]
    mean, rstd = (t if t is None else t.contiguous() for t in (mean, rstd))
    args = (x, grad, out, _vector(scale), None, mean, None, rstd, *sums)
    _call(_NORM_BACKWARD, *args, low=x, wide=grad, flag=mean is not None)
    return out, *(None if s is None else s.sum(0).reshape(*[1] * (x.ndim - 1), -1) for s in sums)


def log_softmax_forward(x: torch.Tensor) -> torch.Tensor:
    """
    :param x: any shape that :func:`may_run` takes
    :return: log_softmax over the last axis, float32, contiguous
    """
    out = x.new_empty(x.shape, dtype=torch.float32)
    _call(_LOG_SOFTMAX_FORWARD, x, None, out, low=x, wide=out)
    return out


def log_softmax_backward(log_probs: torch.Tensor, grad: torch.Tensor, ctc: bool, dtype: torch.dtype) -> torch.Tensor:
    """
    :param log_probs: float32
    :param grad: float32, its gradient
    :param ctc: see :func:`.loss.no_gradient_at_zero`
    :param dtype: of the result
    :return: gradient of the input, contiguous
    """
    out = log_probs.new_empty(log_probs.shape, dtype=dtype)
    _call(_LOG_SOFTMAX_BACKWARD, log_probs, grad, out, low=out, wide=grad, flag=ctc)
    return out


def _vector(param: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    if param is None or (param.dtype == torch.float32 and param.is_contiguous()):
        return param
    return param.reshape(-1).to(torch.float32).contiguous()


def _workers(x: torch.Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // _GRAIN))


def _empty_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype)
    return out if _is_in_rows(out) else x.new_empty(x.shape, dtype=dtype)


def _call(
    op: int,
    x: torch.Tensor,
    grad: Optional[torch.Tensor],
    out: torch.Tensor,
    *vectors: Optional[torch.Tensor],
    low: torch.Tensor,
    wide: torch.Tensor,
    flag: bool = False,
    eps: float = 0.0,
):
    """
    :param op:
    :param x:
    :param grad:
    :param out: to write
    :param vectors: scale, bias, mean, var, rstd, grad_scale, grad_bias; the last ones may be missing
    :param low: the one that is not float32
    :param wide: the one that may be float32
    :param flag: what it means depends on op
    :param eps:
    """
    columns = x.shape[-1]
    inner = x.shape[-2] if x.ndim > 1 else 1
    # the source's struct Problem
    fields = [op, low.dtype == torch.float16, wide.dtype == torch.float32, x.numel() // columns, inner, columns]
    fields += [_workers(x), flag, *_rows(x), *_rows(grad), *_rows(out)]
    fields += [*(0 if v is None else v.data_ptr() for v in vectors), *[0] * (7 - len(vectors))]
    function(fields, eps)


def _rows(x: Optional[torch.Tensor]) -> List[int]:
    """:return: the source's struct Rows, where all but the last two axes are one"""
    if x is None:
        return [0, 0, 0]
    if x.is_contiguous():  # an axis of 1 may have any stride
        return [x.data_ptr(), x.shape[-1] * (x.shape[-2] if x.ndim > 1 else 1), x.shape[-1]]
    return [x.data_ptr(), x.stride(-3) if x.ndim > 2 else 0, x.stride(-2)]


def _probe():
    x = torch.zeros(2, 40, dtype=torch.bfloat16, device="cpu")
    norm_forward(x, None, None, 1.0, True, x.dtype)


function = Function("rows", sources=["rows_native.cpp"], argtypes=[ctypes.c_double], probe=_probe)
