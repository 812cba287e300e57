"""
Attention: the backend ops behind :func:`rf.dot_attention` and the relative-position classes, bound to
:mod:`returnn_upcast.ops.attention`.

The hooks sit on the base class ``Backend``: the torch backend inherits from there,
and the packed backend falls back to it by name.
"""

from __future__ import annotations
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union
import torch
import returnn.frontend as rf
from returnn.tensor import Tensor, Dim
from ..ops import attention as ops
from ..ops.fuse import autocast_off
from ..policy import get_policy, scope
from .common import autocast_dtype, device_type, is_torch


def scaled_dot_product_attention(
    original: Callable,
    cls: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Optional[Tensor] = None,
    att_dropout: Union[float, Tensor] = 0.0,
    att_dropout_broadcast: bool,
    v_feat_dim: Dim,
    qk_feat_dim: Dim,
    kv_spatial_dim: Dim,
    query_spatial_dim: Dim,
    is_causal: bool = False,
    scale: Optional[float] = None,
) -> Tensor:
    """``Backend.scaled_dot_product_attention``, in the dtype that the product q·k has in stock RETURNN"""
    kwargs = dict(
        attention_mask=attention_mask, att_dropout=att_dropout, att_dropout_broadcast=att_dropout_broadcast,
        v_feat_dim=v_feat_dim, qk_feat_dim=qk_feat_dim, kv_spatial_dim=kv_spatial_dim,
        query_spatial_dim=query_spatial_dim, is_causal=is_causal, scale=scale,
    )  # fmt: skip
    dtype = _compute_dtype(query, key, value)
    if dtype is None or "attention" not in get_policy():
        return _stock(original, cls, query, key, value, **kwargs)
    layout = _Layout(query, (key, value), query_spatial_dim, kv_spatial_dim, qk_feat_dim, v_feat_dim)
    if not layout.covered or (is_causal and attention_mask is not None):
        return _plain(original, cls, (query, key, value), dtype, **kwargs)
    mask, bias = layout.mask(None if is_causal else kv_spatial_dim), None
    if attention_mask is not None:
        raw = layout.raw(attention_mask, query_spatial_dim, kv_spatial_dim)
        if attention_mask.dtype == "bool":
            mask = raw if mask is None else mask & raw
        else:
            bias = raw
    out = ops.attention(
        layout.raw(query, query_spatial_dim, qk_feat_dim).to(dtype),
        layout.raw(key, kv_spatial_dim, qk_feat_dim).to(dtype),
        layout.raw(value, kv_spatial_dim, v_feat_dim).to(dtype),
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        scale=scale,
        dropout=_dropout(att_dropout),
        dropout_broadcast=bool(att_dropout_broadcast),
    )
    return layout.wrap(out, value.feature_dim)


def rel_pos_self_attention(
    original: Callable,
    cls: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_emb: Tensor,
    *,
    pos_bias_u: Optional[Tensor],
    pos_bias_v: Optional[Tensor],
    att_dropout: Union[float, Tensor] = 0.0,
    att_dropout_broadcast: bool,
    v_feat_dim: Dim,
    qk_feat_dim: Dim,
    kv_spatial_dim: Dim,
    query_spatial_dim: Dim,
    pos_emb_spatial_dim: Dim,
) -> Tensor:
    """``Backend.rel_pos_self_attention``, in the dtype that the product q·k has in stock RETURNN"""
    kwargs = dict(
        pos_bias_u=pos_bias_u, pos_bias_v=pos_bias_v, att_dropout=att_dropout,
        att_dropout_broadcast=att_dropout_broadcast, v_feat_dim=v_feat_dim, qk_feat_dim=qk_feat_dim,
        kv_spatial_dim=kv_spatial_dim, query_spatial_dim=query_spatial_dim, pos_emb_spatial_dim=pos_emb_spatial_dim,
    )  # fmt: skip
    dtype = _compute_dtype(query, key, value, pos_emb)
    if dtype is None or "attention" not in get_policy():
        return _stock(original, cls, query, key, value, pos_emb, **kwargs)
    biases = [b for b in (pos_bias_u, pos_bias_v) if b is not None]
    layout = _Layout(query, (key, value, pos_emb, *biases), query_spatial_dim, kv_spatial_dim, qk_feat_dim, v_feat_dim)
    layout.batch = [d for d in layout.batch if d != pos_emb_spatial_dim]
    if not layout.covered:
        return _plain(original, cls, (query, key, value, pos_emb), dtype, **kwargs)
    bias_u, bias_v = (
        layout.raw(b, query_spatial_dim, qk_feat_dim) if b is not None else None for b in (pos_bias_u, pos_bias_v)
    )
    out = ops.rel_pos_attention(
        layout.raw(query, query_spatial_dim, qk_feat_dim).to(dtype),
        layout.raw(key, kv_spatial_dim, qk_feat_dim).to(dtype),
        layout.raw(value, kv_spatial_dim, v_feat_dim).to(dtype),
        layout.raw(pos_emb, pos_emb_spatial_dim, qk_feat_dim).to(dtype),
        bias_u=bias_u,
        bias_v=bias_v,
        mask=layout.mask(kv_spatial_dim),
        dropout=_dropout(att_dropout),
        dropout_broadcast=bool(att_dropout_broadcast),
    )
    return layout.wrap(out, v_feat_dim)


def _compute_dtype(*tensors: Tensor) -> Optional[torch.dtype]:
    """
    :return: the low-precision dtype in which stock RETURNN multiplies these: under autocast that of autocast, whatever
        they have now; else their common one. None if that is not low, or they are not torch tensors
    """
    if not is_torch(*tensors):
        return None
    dtypes = {x.raw_tensor.dtype for x in tensors}
    if not all(dtype.is_floating_point for dtype in dtypes) or torch.float64 in dtypes:
        return None
    dtype = autocast_dtype(tensors[0]) or (dtypes.pop() if len(dtypes) == 1 else torch.float32)
    return dtype if dtype.itemsize < 4 else None


def _stock(original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    # float32 weights out of rf.softmax could not be multiplied with low-precision values
    if "softmax" in get_policy():
        with scope({"softmax": False}):
            return original(*args, **kwargs)
    return original(*args, **kwargs)


def _plain(original: Callable, cls: Any, tensors: Sequence[Tensor], dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """RETURNN's own code on float32 copies, for layouts that the raw ops don't take"""
    name = str(dtype).split(".")[1]
    with autocast_off(device_type(tensors[0])):
        return rf.cast(original(cls, *(rf.cast(rf.cast(x, name), "float32") for x in tensors), **kwargs), name)


def _dropout(prob: Union[float, Tensor]) -> float:
    """:return: the probability in effect, 0 outside of training"""
    train = rf.get_run_ctx().is_train_flag_enabled(func=rf.dropout)
    if not (train if isinstance(train, bool) else bool(train.raw_tensor)):
        return 0.0
    return float(prob.raw_tensor if isinstance(prob, Tensor) else prob)


class _Layout:
    """
    From RF dims to [batch..., spatial, feature], and back. One spatial dim may be both the query's and the keys'.
    """

    def __init__(self, query: Tensor, others: Sequence[Tensor], q_dim: Dim, kv_dim: Dim, qk_feat: Dim, v_feat: Dim):
        self.query, self.q_dim, self.kv_dim, self.v_feat, self.qk_feat = query, q_dim, kv_dim, v_feat, qk_feat
        self.single = q_dim not in query.dims  # a single step: no query axis
        self.batch: List[Dim] = [d for d in query.dims if d not in (q_dim, qk_feat)]
        for x in others:
            self.batch += [d for d in x.dims if d not in (*self.batch, kv_dim, qk_feat, v_feat)]
        extra_query = q_dim != kv_dim and any(q_dim in x.dims for x in others)
        repeated = any(len(set(x.dims)) != len(x.dims) for x in (query, *others))
        self.covered = not extra_query and not repeated and kv_dim not in self.batch

    def raw(self, x: Tensor, spatial: Dim, feature: Dim) -> torch.Tensor:
        """:return: x as [batch..., spatial, feature], broadcast axes of size 1 where x lacks a dim"""
        if spatial == self.q_dim and self.single:
            return x.copy_compatible_to_dims_raw([*self.batch, feature]).unsqueeze(-2)
        return x.copy_compatible_to_dims_raw([*self.batch, spatial, feature])

    def mask(self, kv_dim: Optional[Dim]) -> Optional[torch.Tensor]:
        """:return: bool [batch..., query or 1, keys], True inside the sequence; None if nothing is padded"""
        if kv_dim is None or not kv_dim.need_masking():
            return None
        mask = kv_dim.get_mask(device=self.query.device)
        return self.raw(mask, self.q_dim, kv_dim)

    def wrap(self, raw: torch.Tensor, feature_dim: Optional[Dim]) -> Tensor:
        """:return: raw [batch..., query, v_feat], in the order of the query's dims, since the memory mostly has it"""
        dims: Tuple[Dim, ...] = (*self.batch, self.q_dim, self.v_feat)
        if self.single:
            raw, dims = raw.squeeze(-2), (*self.batch, self.v_feat)
        order = [self.v_feat if d == self.qk_feat else d for d in self.query.dims]
        order = [d for d in dims if d not in order] + order
        out = Tensor("att", dims=order, dtype=str(raw.dtype).split(".")[1])
        out.raw_tensor = raw.permute([dims.index(d) for d in order])
        if feature_dim is not None and feature_dim in out.dims:
            out.feature_dim = feature_dim
        return out
