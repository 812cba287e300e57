"""
Attention as plain differentiable torch code: what it is, and what runs where no fused code may.
"""

from __future__ import annotations
from typing import NamedTuple, Optional, Tuple
import math
import torch
from .fuse import differentiate
from .matmul import product


class Inputs(NamedTuple):
    """Tensors of one attention, with equally many axes. See :mod:`.attention` for shapes and dtypes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pos: Optional[torch.Tensor] = None
    bias_u: Optional[torch.Tensor] = None
    bias_v: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None
    mask: Optional[torch.Tensor] = None  # bool, True = attend
    keep: Optional[torch.Tensor] = None  # bool, False = weight dropped

    @property
    def lead(self) -> torch.Size:
        """:return: sizes of the leading axes (batch and heads), to which those of all tensors broadcast"""
        return torch.broadcast_shapes(*(x.shape[:-2] for x in self if x is not None))


class Options(NamedTuple):
    """What else makes up one attention"""

    causal: bool
    scale: float
    keep_scale: float  # what dropout multiplies the kept weights with


def plain_attention(inputs: Inputs, options: Options) -> torch.Tensor:
    """:return: [..., Tq, V] in the dtype of q; all in at least float32, rounded once, whatever autocast says"""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    q, k, v, pos, u, w, bias = (x if x is None else x.to(wide) for x in inputs[:7])
    # transpose, as the ONNX exporter based on torch.jit does not know .mT
    energies = product(q if u is None else q + u, k.transpose(-2, -1))
    if pos is not None:
        energies = energies + _shift(product(q if w is None else q + w, pos.transpose(-2, -1)), k.shape[-2])
    energies = energies * options.scale
    if bias is not None:
        energies = energies + bias
    mask = inputs.mask
    if options.causal:
        past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = past if mask is None else mask & past
    if mask is not None:
        energies = energies.masked_fill(~mask, -math.inf)
    weights = energies.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)  # softmax over nothing is NaN, over NaN as well
    if inputs.keep is not None:
        weights = weights * inputs.keep * options.keep_scale
    return product(weights, v).to(inputs.q.dtype)


def differentiable_gradients(
    inputs: Inputs, options: Options, grad: torch.Tensor
) -> Tuple[Optional[torch.Tensor], ...]:
    """:return: of the first six inputs, connected to all of them and to grad, the gradient of the output"""
    return differentiate(lambda *floats: plain_attention(Inputs(*floats, *inputs[6:]), options), inputs[:6], grad)


def _shift(x: torch.Tensor, keys: int) -> torch.Tensor:
    """
    :param x: [..., Tq, R] by relative position r = j - i + Tq - 1
    :param keys: Tk
    :return: [..., Tq, Tk] by query i and key j (https://arxiv.org/abs/1901.02860, appendix B)
    """
    *batch, queries, positions = x.shape
    x = torch.nn.functional.pad(x, (1, 0)).reshape(*batch, positions + 1, queries)
    return x[..., 1:, :].reshape(*batch, queries, positions)[..., :keys]
