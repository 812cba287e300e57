"""
Attention with energies, softmax and weighted sum in float32: dot products, and relative positions as in Transformer-XL.

Which case takes which path (each says so once in the debug log):

=========================================================  =======================================================
outer trace, ``torch.func``, forward-mode AD, subclasses   plain: differentiable float32 ops
CUDA, without bias, relative positions, shared dropout     sdpa: ``F.scaled_dot_product_attention``
all else                                                   blocks: :mod:`.attention_blocks`
=========================================================  =======================================================

On the CPU, the flash kernel of ``F.scaled_dot_product_attention`` has no dropout, and misses our precision:
gradients of up to 5 times the rounding floor where stock RETURNN's limit is 4 (logits of std 16), 3.9 where it is 3
(4,000 causal queries), since it rounds weights, energies' gradients and, between blocks, the gradients of keys and values.
The blocks are faster as well.
"""

from __future__ import annotations
from typing import Optional, Sequence, Set, Tuple
import logging
import math
import torch
from .attention_fused import BlockAttention
from .attention_plain import Inputs, Options, plain_attention
from .fuse import autocast_off, differentiate, may_fuse

log = logging.getLogger("returnn.frontend.upcast")


def attention(q, k, v, *, mask=None, bias=None, is_causal=False, scale=None, dropout=0.0, dropout_broadcast=False, zero_masked_rows=False):
    return _attention(Inputs(q, k, v, bias=bias, mask=mask), is_causal, scale, dropout, dropout_broadcast)

def rel_pos_attention(q, k, v, pos_emb, *, bias_u=None, bias_v=None, mask=None, scale=None, dropout=0.0, dropout_broadcast=False, zero_masked_rows=False):
    return _attention(Inputs(q, k, v, pos_emb, bias_u, bias_v, mask=mask), False, scale, dropout, dropout_broadcast)


def _attention(inputs, causal, scale, dropout, dropout_broadcast):
    ndim = max(x.ndim for x in inputs if x is not None)
    inputs = Inputs(*(x if x is None else x[(None,) * (ndim - x.ndim)] for x in inputs))
    options = Options(causal, inputs.q.shape[-1] ** -0.5 if scale is None else scale, 1.0)
    with autocast_off(inputs.q.device.type):
        if dropout:
            keep, keep_scale = dropout_mask(inputs, dropout, dropout_broadcast)
            inputs, options = inputs._replace(keep=keep), options._replace(keep_scale=keep_scale)
        if may_fuse(*inputs):
            return BlockAttention.apply(options, *inputs)
        return plain_attention(inputs, options)


def dropout_mask(inputs, dropout, broadcast):
    q, k = inputs.q, inputs.k
    shape = (*torch.broadcast_shapes(*(x.shape[:-2] for x in inputs if x is not None)), q.shape[-2], k.shape[-2])
    if broadcast:
        shape = (1,) * (len(shape) - 1) + shape[-1:]
    drop = round(dropout * 2**16)
    keep = torch.empty(shape, dtype=torch.bool, device=q.device)
    flat, chunk = keep.view(-1), 1 << 18
    bits = torch.empty(min(chunk, len(flat)) // 4 + 1, dtype=torch.int64, device=q.device)
    for start in range(0, len(flat), chunk):
        part = flat[start : start + chunk]
        bits.random_(-(2**63), None)
        torch.ge(bits.view(torch.int16)[: len(part)], drop - 2**15, out=part)
    return keep, (1 / (1 - drop / 2**16) if drop < 2**16 else 0.0)
