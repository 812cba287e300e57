"""
Matrix products that are accumulated and returned in float32, from operands of any dtype, which are not rounded:
:func:`matmul_wide` for kernels, :class:`Product` for plain differentiable code.
"""

from __future__ import annotations
from typing import Callable
import platform
import torch
from .fuse import autocast_is_on, autocast_off
from .loss_rows import wide_dtype

# torch hands float32 products to MKL, which is half as fast as oneDNN on AMD (and not faster on Intel). This op of
# oneDNN is what torch.compile makes of F.linear. For small products its call costs more than it saves.
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN = _ONEDNN and platform.machine() in ("x86_64", "AMD64")
_MIN_ONEDNN_PRODUCTS = 1 << 20

_MM_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None  # CUDA only


def matmul_wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """
    :param a: [M, K], any float dtype
    :param b: [K, N], any float dtype
    :return: [M, N], a @ b in at least float32. Not differentiable, and not to be called under autocast.
    """
    wide = wide_dtype(a, b)
    if a.is_cuda and _MM_OUT_DTYPE and wide == torch.float32 and {a.dtype, b.dtype} != {torch.float32}:
        return split_matmul(a, b, lambda a_, b_: torch.mm(a_, b_, out_dtype=torch.float32))
    a, b = a.to(wide), b.to(wide)
    products = a.shape[0] * a.shape[1] * b.shape[1]
    on_cpu = a.device.type == "cpu" and wide == torch.float32
    if on_cpu and _ONEDNN and products >= _MIN_ONEDNN_PRODUCTS and torch.backends.mkldnn.enabled:
        return torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b.T), None, "none", [], "")
    return a @ b


class Product(torch.autograd.Function):
    """
    ``apply(a, b)`` -> a @ b, for [..., M, K] and [..., K, N] of the same dtype, without autocast, in backward neither.
    That may run under autocast although the forward did not: torch.compile traces it like the caller of the forward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a, b):
        with torch.autocast(a.device.type, enabled=False):  # not autocast_off, which a trace of backward would skip
            return a @ b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a = Product.apply(grad, b.transpose(-2, -1)).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        grad_b = Product.apply(a.transpose(-2, -1), grad).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """
    :param a: [..., M, K], or [..., K] if b has two axes
    :param b: [..., K, N], of the dtype of a
    :return: a @ b, by :class:`Product` if it is to be differentiated and autocast is on. To be called under that.
    """
    if b.ndim == 2 and a.ndim != 2:  # as one product, whose gradient for b is not summed over products
        return product(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    device = a.device.type
    has_backward = torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0  # not in forward AD
    if has_backward and autocast_is_on(device):
        return Product.apply(a, b)
    with autocast_off(device):
        return a @ b


def _dense(x: torch.Tensor) -> torch.Tensor:
    # for a slice of columns, oneDNN has only its slow reference kernel
    return x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous()


def split_matmul(a: torch.Tensor, b: torch.Tensor, mm: Callable) -> torch.Tensor:
    """
    A float32 operand is split into two of low precision: a sum of two fast products, exact to 16 bits (f16: 22).

    :param a: [M, K], float32 or low precision
    :param b: [K, N], the same; not both float32
    :param mm: product of two matrices of the same low-precision dtype, in float32
    :return: [M, N], float32
    """
    if a.dtype == b.dtype:
        return mm(a, b)
    if b.dtype == torch.float32:
        return split_matmul(b.T, a.T, lambda b_, a_: mm(a_.T, b_.T).T).T
    if a.dtype != torch.float32:
        return split_matmul(a.float(), b, mm)  # bf16 times f16
    scale = None
    if b.dtype == torch.float16 and a.numel():
        # f16 has too few exponents for what gradients span. By rows, so that inf in one does not reach the others
        scale = a.abs().amax(1, keepdim=True).clamp_min(1e-30) / 2**15
        scale = torch.where(scale.isfinite(), scale, 1.0)
        a = a / scale
    high = a.to(b.dtype)
    out = mm(high, b)
    # where this is inf or NaN, it is the result: the rest would be inf - inf, or 0 * inf
    out = torch.where(out.isfinite(), out + mm((a - high).to(b.dtype), b), out)
    return out if scale is None else out * scale
