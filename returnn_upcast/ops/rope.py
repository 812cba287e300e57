"""
Rotary position embedding: the rotation in float32, rounded once.
"""

from __future__ import annotations
import torch
from .fuse import compiled, may_fuse


def apply_rope(x: torch.Tensor, pos_enc: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    """
    :param x: [..., D], D even, any float dtype; neighbouring features (2i, 2i+1) are one complex number
    :param pos_enc: [..., D] broadcastable to x, any float dtype; sin in the first half of D, cos in the second
    :param out_dtype: float dtype of the result
    :return: [..., D], x rotated by the angles (https://arxiv.org/abs/2104.09864), in at least float32, rounded once
    """
    if may_fuse(x, pos_enc) and not pos_enc.requires_grad:
        return _Rope.apply(x, pos_enc, out_dtype)
    return _rotate(x, pos_enc, 1.0, out_dtype)


def _rotate(x: torch.Tensor, pos_enc: torch.Tensor, sign: float, out_dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(torch.promote_types(x.dtype, pos_enc.dtype), torch.float32)
    sin, cos = pos_enc.to(wide).chunk(2, dim=-1)
    real, imag = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    sin = sin * sign
    out = torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1)
    return out.flatten(-2).to(out_dtype)


_rotate_fused = compiled(_rotate)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pos_enc, out_dtype):
        ctx.save_for_backward(pos_enc)
        ctx.dtype = x.dtype
        return _rotate_fused(x, pos_enc, 1.0, out_dtype)

    @staticmethod
    def backward(ctx, grad):
        # the inverse of a rotation is its transpose
        (pos_enc,) = ctx.saved_tensors
        rotate = _rotate if torch.is_grad_enabled() else _rotate_fused
        return rotate(grad, pos_enc, -1.0, ctx.dtype), None, None
