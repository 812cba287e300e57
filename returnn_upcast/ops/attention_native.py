"""
Attention on the CPU in bf16 and f16 as C++ code: float32 energies, softmax and sums, nothing quadratic is kept.

Why not from torch's ops as in :mod:`.attention_fused`: there each step between the products goes through the memory
once more, and copies of the operands are transposed. (Measured on Zen 4 with 2 threads, causal, [8, 8, 400, 64], forward
and backward: 44 ms against 107 ms, and 96 ms for torch's own flash kernel in bf16.)

Where it can't be compiled, see :mod:`.native`, or where oneDNN has no such kernels, the blocks of :mod:`.attention_fused`
run.
"""

from __future__ import annotations
from typing import List, Optional, Sequence
import ctypes
import math
import torch
from .attention_fused import empty_as
from .attention_plain import Inputs, Options, differentiable_gradients
from .fuse import autocast_off
from .native import Function, is_readable, readable

MIN_ENERGIES = 32_768  # with less, nobody waits for a compiler
MIN_ENTRIES = 4  # of batch and heads, or as many as there are threads, if these are fewer

_MAX_LEAD = 8  # as in the source


def may_run(inputs: Inputs) -> bool:
    """
    :param inputs: as for :class:`NativeAttention`
    :return: whether these inputs are for the native code, and it is there; compiles it if not done yet
    """
    if inputs.q.dtype not in (torch.bfloat16, torch.float16) or inputs.bias is not None or not _is_readable(inputs):
        return False
    entries = math.prod(inputs.lead)
    if entries * inputs.q.shape[-2] * inputs.k.shape[-2] < MIN_ENERGIES or len(inputs.lead) > _MAX_LEAD:
        return False
    # Entries are what the threads share. With fewer of them most would idle, where those of the blocks share a product.
    return entries >= min(torch.get_num_threads(), MIN_ENTRIES) and function.is_available()


def _is_readable(inputs: Inputs) -> bool:
    """
    :return: whether all is what C++ code may read by pointer: dtypes, sizes, memory. The blocks know what to do
        otherwise, or raise torch's errors.
    """
    q, k, v, pos, bias_u, bias_v = inputs[:6]
    features, queries, keys = q.shape[-1], q.shape[-2], k.shape[-2]
    sizes = [(q, queries, features), (k, keys, features), (v, keys, v.shape[-1]), (pos, queries + keys - 1, features)]
    sizes += [(bias_u, 1, features), (bias_v, 1, features)]
    return (
        features > 0
        and v.shape[-1] > 0
        and all(x is None or x.shape[-2:] == (rows, columns) for x, rows, columns in sizes)
        and all(x is None or x.dtype == q.dtype for x in inputs[:4])
        and all(x is None or x.dtype == torch.bool for x in inputs[7:])
        and all(x is None or is_readable(x) for x in inputs)
    )


class NativeAttention(torch.autograd.Function):
    """``apply(options, *inputs)`` -> [..., Tq, V] in the dtype of q. Saves nothing but the inputs"""

    @staticmethod
    def forward(ctx, options: Options, *tensors: Optional[torch.Tensor]) -> torch.Tensor:
        inputs = Inputs(*tensors)
        ctx.save_for_backward(*inputs)
        ctx.options = options
        # as q lies in memory, since the caller's next op mostly wants it like that
        shape = (*inputs.lead, inputs.q.shape[-2], inputs.v.shape[-1])
        out = empty_as(inputs.q.expand(*inputs.lead, -1, -1), shape, inputs.q.dtype)
        _call(inputs, options, out=out)
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs = Inputs(*ctx.saved_tensors)
        with autocast_off("cpu"):
            if torch.is_grad_enabled():
                grads = differentiable_gradients(inputs, ctx.options, grad)
            else:
                grads = _gradients(inputs, ctx.options, readable(grad), ctx.needs_input_grad[1:7])
            return None, *grads, None, None, None


def _gradients(
    inputs: Inputs, options: Options, grad_out: torch.Tensor, needed: Sequence[bool]
) -> List[Optional[torch.Tensor]]:
    """:return: of q, k, v, pos, bias_u, bias_v, in their dtypes; None where not needed"""
    lead, grads, sums = inputs.lead, [None] * 6, [None] * 6
    for i, x in enumerate(inputs[:6]):
        if not needed[i]:
            continue
        if x.shape[:-2] == lead and i < 4:
            grads[i] = empty_as(x, x.shape, x.dtype)
        else:
            sums[i] = x.new_zeros((_workers(lead), *x.shape), dtype=torch.float32)
    _call(inputs, options, grad_out=grad_out, grads=grads, sums=sums)
    return [grad if x is None else x.sum(0).to(inputs[i].dtype) for i, (grad, x) in enumerate(zip(grads, sums))]


def _workers(lead: Sequence[int]) -> int:
    return max(1, min(torch.get_num_threads(), math.prod(lead)))


def _call(
    inputs: Inputs,
    options: Options,
    *,
    out: Optional[torch.Tensor] = None,
    grad_out: Optional[torch.Tensor] = None,
    grads: Sequence[Optional[torch.Tensor]] = (None,) * 6,
    sums: Sequence[Optional[torch.Tensor]] = (None,) * 6,
):
    """
    :param inputs:
    :param options:
    :param out: [..., Tq, V], to write
    :param grad_out: [..., Tq, V]
    :param grads: of q, k, v, pos, bias_u, bias_v, to write
    :param sums: the same in float32 with a leading axis of the workers, added to; for those to which entries broadcast
    """
    q, k, v = inputs[:3]
    lead = inputs.lead
    weights = (*lead, q.shape[-2], k.shape[-2])
    # the source's struct Problem
    fields = [_workers(lead), q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], int(options.causal), len(lead)]
    fields += [*lead, *[0] * (_MAX_LEAD - len(lead))]
    keep_alive = [b if b is None else b.float() for b in inputs[4:6]]
    masks = (x if x is None else x.expand(weights) for x in inputs[7:])
    for x in (*inputs[:4], *keep_alive, *masks, out, grad_out):
        fields += _operand(x, lead)
    for grad, x in zip(grads, sums):
        fields += _operand(grad, lead) if x is None else _operand(x[0], lead, worker=x.stride(0))
    function(fields, options.scale, options.keep_scale, q.dtype == torch.float16, grad_out is not None)


def _operand(x: Optional[torch.Tensor], lead: Sequence[int], worker: int = 0) -> List[int]:
    """:return: the source's struct Operand"""
    if x is None:
        return [0] * (4 + _MAX_LEAD)
    *strides, row, column = x.expand(*lead, -1, -1).stride()
    return [x.data_ptr(), worker, row, column, *strides, *[0] * (_MAX_LEAD - len(strides))]


def _probe():
    """:raises RuntimeError: oneDNN has no such kernels for this CPU"""
    x = torch.zeros(1, 80, 80, dtype=torch.bfloat16, device="cpu")
    inputs, options = Inputs(x, x, x), Options(False, 1.0, 1.0)
    _call(inputs, options, out=torch.empty_like(x))
    _gradients(inputs, options, x, [True] * 3 + [False] * 3)


function = Function(
    "attention",
    sources=["attention_native.h", "attention_native.cpp"],
    argtypes=[*[ctypes.c_double] * 2, *[ctypes.c_bool] * 2],
    probe=_probe,
)
