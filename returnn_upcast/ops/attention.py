"""
Attention with energies, softmax and weighted sum in float32: dot products, and relative positions as in Transformer-XL.

Which case takes which path (each says so once in the debug log):

=======================================================================  ===============================================
outer trace, ``torch.func``, forward-mode AD                             plain: differentiable float32 ops
a bias that needs grad, a dispatch mode (RETURNN's checkpointing)        the same
CUDA without relative positions, bias or shared dropout, not in a trace  sdpa: ``F.scaled_dot_product_attention``
CPU in bf16 or f16, no bias, enough energies and heads, a C++ compiler   native: :mod:`.attention_native`
all else                                                                 blocks: :mod:`.attention_fused`
=======================================================================  ===============================================

On the CPU, the flash kernel of ``F.scaled_dot_product_attention`` has no dropout, and misses our precision:
gradients of up to 5 times the rounding floor where the limit is 4 (logits of std 16), 3.9 where it is 3 (4,000 causal
queries), since it rounds weights, energies' gradients and, between blocks, the gradients of keys and values.
It is slower as well, see :mod:`.attention_native`.
"""

from __future__ import annotations
from typing import Optional, Set, Tuple, Type
import logging
import math
import torch
import torch.nn.functional as F
from .attention_fused import BlockAttention
from .attention_native import NativeAttention, may_run as may_run_native
from .attention_plain import Inputs, Options, plain_attention
from .fuse import autocast_off, is_traced, may_fuse, needs_grad

log = logging.getLogger("returnn.frontend.upcast")

_logged: Set[str] = set()
_RANDOM_CHUNK = 1 << 18  # random numbers that are made at once, so that they stay in the cache


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    is_causal: bool = False,
    scale: Optional[float] = None,
    dropout: float = 0.0,
    dropout_broadcast: bool = False,
) -> torch.Tensor:
    """
    :param q: [..., Tq, K], any float dtype, any strides
    :param k: [..., Tk, K], the same dtype; leading axes of all arguments broadcast
    :param v: [..., Tk, V]
    :param mask: bool [..., Tq, Tk] up to broadcasting, True where to attend
    :param bias: added to the scaled energies, [..., Tq, Tk] up to broadcasting, any float dtype
    :param is_causal: query i attends to the keys up to i only
    :param scale: of the energies, default K ** -0.5
    :param dropout: probability with which a weight is dropped; the others are scaled up
    :param dropout_broadcast: the same weights are dropped for all queries and leading axes
    :return: [..., Tq, V] in the dtype of q; all is computed in at least float32 and rounded once.
        A query to which all keys are masked gives 0
    """
    return _attention(Inputs(q, k, v, bias=bias, mask=mask), is_causal, scale, dropout, dropout_broadcast)


def rel_pos_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pos_emb: torch.Tensor,
    *,
    bias_u: Optional[torch.Tensor] = None,
    bias_v: Optional[torch.Tensor] = None,
    mask: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    dropout: float = 0.0,
    dropout_broadcast: bool = False,
) -> torch.Tensor:
    """
    Energies ((q + u)·k + (q + w)·pos) * scale, with pos by relative position (https://arxiv.org/abs/1901.02860).
    The biases are multiplied apart from q: so q is not rounded again, and its products have exact operands.

    :param q: [..., Tq, K], and k, v, mask, scale, dropout, dropout_broadcast: see :func:`attention`
    :param pos_emb: [..., R, K], R = Tq + Tk - 1: key j and query i have the position j - i + Tq - 1
    :param bias_u: u, [..., 1, K], any float dtype
    :param bias_v: w, the same
    :return: [..., Tq, V] in the dtype of q; all is computed in at least float32 and rounded once
    :raises ValueError: pos_emb has another number of positions
    """
    need = q.shape[-2] + k.shape[-2] - 1
    if pos_emb.shape[-2] != need:
        raise ValueError(f"rel_pos_attention: pos_emb has {pos_emb.shape[-2]} positions, {need} are needed")
    inputs = Inputs(q, k, v, pos_emb, bias_u, bias_v, mask=mask)
    return _attention(inputs, False, scale, dropout, dropout_broadcast)


def _attention(inputs: Inputs, causal: bool, scale: Optional[float], dropout: float, broadcast: bool) -> torch.Tensor:
    lead = max(x.ndim for x in inputs if x is not None) - 2
    ndim = max(lead, 1) + 2  # the blocks want at least one leading axis
    inputs = Inputs(*(x if x is None else x[(None,) * (ndim - x.ndim)] for x in inputs))
    options = Options(causal, inputs.q.shape[-1] ** -0.5 if scale is None else scale, 1.0)
    flash = inputs.q.is_cuda and inputs.pos is None and inputs.bias is None and not (dropout and broadcast)
    # unlike the blocks, flash attention is one of torch's ops, which a dispatch mode sees, so it may record it
    if flash and not is_traced(*inputs):
        out = _sdpa(inputs, options, dropout)
    else:
        fuse = may_fuse(*inputs) and not needs_grad(inputs.bias)
        if dropout:
            keep, keep_scale = dropout_mask(inputs, dropout, broadcast)
            inputs, options = inputs._replace(keep=keep), options._replace(keep_scale=keep_scale)
        if not fuse:
            _log_path("plain")
            out = plain_attention(inputs, options)
        elif may_run_native(inputs):
            _log_path("native")
            out = _fused(NativeAttention, inputs, options)
        else:
            _log_path("blocks")
            out = _fused(BlockAttention, inputs, options)
    return out if lead > 0 else out.squeeze(0)


def _fused(function: Type[torch.autograd.Function], inputs: Inputs, options: Options) -> torch.Tensor:
    with autocast_off(inputs.q.device.type):
        return function.apply(options, *inputs)


def _log_path(path: str):
    if path not in _logged and not torch.compiler.is_compiling():
        _logged.add(path)
        log.debug("rf_upcast: attention runs by path %r, see returnn_upcast.ops.attention", path)


def _sdpa(inputs: Inputs, options: Options, dropout: float) -> torch.Tensor:
    """The flash and memory-efficient kernels of CUDA have float32 energies, softmax and sums inside."""
    _log_path("sdpa")
    mask, causal = inputs.mask, options.causal
    if mask is not None and causal:
        past = torch.ones(inputs.q.shape[-2], inputs.k.shape[-2], dtype=torch.bool, device=mask.device).tril()
        mask, causal = mask & past, False
    dead = None
    if mask is not None:
        dead = ~mask.any(-1, keepdim=True)  # some kernels give NaN for softmax over nothing
        mask = mask | dead
    q, k, v = (x.expand(*inputs.lead, -1, -1) for x in inputs[:3])
    with autocast_off(q.device.type):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=options.scale
        )
    return out if dead is None else out.masked_fill(dead, 0.0)


def dropout_mask(inputs: Inputs, dropout: float, broadcast: bool) -> Tuple[torch.Tensor, float]:
    """
    :param inputs: for the shapes; random numbers come from torch's generator of their device
    :param dropout: probability, rounded to a multiple of 2 ** -16
    :param broadcast: one mask over the keys for all
    :return: bool [..., Tq, Tk], True for the weights that are kept, and the factor for them
    """
    q, k = inputs.q, inputs.k
    shape = (*inputs.lead, q.shape[-2], k.shape[-2])
    if broadcast:
        shape = (1,) * (len(shape) - 1) + shape[-1:]
    drop = round(dropout * 2**16)
    keep_scale = 1 / (1 - drop / 2**16) if drop < 2**16 else 0.0
    # 16 random bits per weight, four at once: bernoulli_ takes six times as long on the CPU
    numel = math.prod(shape)
    if not may_fuse(q, k):
        # the same numbers as below: a checkpoint or a trace must not change them
        return (_random_bits(numel, q.device) >= drop - 2**15).view(shape), keep_scale
    keep = torch.empty(numel, dtype=torch.bool, device=q.device)
    for start in range(0, numel, _RANDOM_CHUNK):
        part = keep[start : start + _RANDOM_CHUNK]
        torch.ge(_random_bits(len(part), q.device), drop - 2**15, out=part)
    return keep.view(shape), keep_scale


def _random_bits(numel: int, device: torch.device) -> torch.Tensor:
    """:return: int16 [numel], all values equally likely"""
    # randint, as traces and vmap know it and torch.fx can't write random_; it leaves out 1 of 2 ** 64 values
    bits = torch.randint(-(2**63), 2**63 - 1, ((numel + 3) // 4,), device=device)
    return bits.view(torch.int16)[:numel]
