"""
The op table as properties see it: RETURNN's call beside its float64 formula, on one layout of [batch, beam, time, feature].
"""

from __future__ import annotations
from typing import Any, Callable, NamedTuple, Sequence
import functools
import math
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
import references
from common import inside, name_of, seq_dim, tensor, values
from property_layouts import Layout, Op, frame_dims
from property_losses import HELPERS, LOSSES, SOFTMAX

GROUPS = 4


def _flat(func: Callable, la: Layout, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """:return: func of [batch * beam, time, feature] and the lengths"""
    lens = [n for n in la.lens for _ in range(la.beam)]
    return func(x.flatten(0, 1), {}, lens=lens, **kwargs).reshape(x.shape)


# Squares of what is larger overflow in float32: rms_norm gives zeros there as in stock, the others NaN, as stock does.
_SQUARES = 1e17


def _norm(name: str, call: Callable, formula: Callable) -> Op:
    return Op(name, lambda la, x: call(la.tensor(x), *la.dims[2:]), frame_dims, formula, limit=_SQUARES)


def _batch_norm(la: Layout, x: torch.Tensor) -> torch.Tensor:
    frames = x[la.mask]
    return (x - frames.mean(0)) / torch.sqrt(((frames - frames.mean(0)) ** 2).mean(0) + 1e-3)


NORMS = (
    _norm("LayerNorm", lambda x, _, f: rf.LayerNorm(f)(x), lambda la, x: references.layer_norm(x, {})),
    _norm("RMSNorm", lambda x, _, f: rf.RMSNorm(f)(x), lambda la, x: references.rms_norm(x, {})),
    _norm(
        "GroupNorm", lambda x, _, f: rf.GroupNorm(f, num_groups=GROUPS)(x),
        lambda la, x: references.group_norm(x, {}, groups=GROUPS),
    ),
    _norm(
        "GroupNormSpatial", lambda x, t, f: rf.GroupNormSpatial(f, num_groups=GROUPS)(x, spatial_dim=t),
        lambda la, x: _flat(references.group_norm_spatial, la, x, groups=GROUPS),
    ),
    _norm("BatchNorm", lambda x, _, f: rf.BatchNorm(f, use_mask=True)(x), _batch_norm),
    _norm("normalize", lambda x, _, f: rf.normalize(x, axis=f), lambda la, x: references.layer_norm(x, {})),
    _norm(
        "normalize, time", lambda x, t, _: rf.normalize(x, axis=t),
        lambda la, x: _flat(references.normalize_time, la, x),
    ),
    _norm(
        "Normalize", lambda x, t, f: rf.Normalize(param_dims=f)(x, axis=t),
        lambda la, x: _flat(references.normalize_time, la, x),
    ),
)  # fmt: skip


def _allowed(la: Layout, kind: str) -> torch.Tensor:
    """:return: bool [batch, beam, query, key]"""
    size = max(la.lens)
    if kind == "causal":
        return torch.ones(len(la.lens), la.beam, size, size, dtype=torch.bool).tril()
    keys = inside(la.lens if kind == "rel-pos" else la.lens[::-1])[:, None, None].expand(-1, la.beam, size, -1)
    return keys & _attention_mask(la) if kind == "masked" else keys


def _attention_mask(la: Layout) -> torch.Tensor:
    return la.labels(3, 3)[:, :, None] + la.labels(4, 3)[..., None] < 3


def _energies(la: Layout, kind: str, q: torch.Tensor, k: torch.Tensor, *pos: torch.Tensor) -> torch.Tensor:
    energies = torch.einsum("bxqf,bxkf->bxqk", q, k)
    if kind == "rel-pos":
        frames = torch.arange(q.shape[2])
        position = frames - frames[:, None] + len(frames) - 1  # of key j and query i: j - i + Tq - 1
        energies = energies + (q @ pos[0].T).gather(-1, position.expand(energies.shape))
    return energies * la.feat**-0.5


def _attention(kind: str, la: Layout, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    """:return: with the weights of zero times the masked values, and without"""
    allowed = _allowed(la, kind)
    v = inputs[2]
    energies = _energies(la, kind, *inputs[:2], *inputs[3:]).masked_fill(~allowed, -math.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), energies.softmax(-1), 0.0)
    rows = zip(allowed.unbind(2), weights.unbind(2))
    exclusive = torch.stack([torch.where(a[..., None], w[..., None] * v, 0.0).sum(2) for a, w in rows], 2)
    return weights @ v, exclusive


def _call_attention(kind: str, la: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *pos) -> Tensor:
    batch, beam, time, feat = la.dims
    keys = {"causal": time, "rel-pos": seq_dim("keys", la.lens, batch)}.get(kind, la.other_dims[2])
    q_, k_, v_ = (
        la.tensor(x, (batch, beam, d, f)) for x, d, f in ((q, time, feat), (k, keys, feat), (v, keys, la.other_dims[3]))
    )
    backend = q_._raw_backend
    kwargs = dict(
        att_dropout_broadcast=False, v_feat_dim=la.other_dims[3], qk_feat_dim=feat, kv_spatial_dim=keys,
        query_spatial_dim=time,
    )  # fmt: skip
    if kind == "rel-pos":
        positions = Dim(len(pos[0]), name="positions")
        return backend.rel_pos_self_attention(
            q_, k_, v_, tensor(pos[0], positions, feat), pos_bias_u=None, pos_bias_v=None,
            pos_emb_spatial_dim=positions, **kwargs,
        )  # fmt: skip
    if kind == "masked":
        mask = tensor(_attention_mask(la), batch, beam, time, keys)
        return backend.scaled_dot_product_attention(q_, k_, v_, attention_mask=mask, **kwargs)
    causal = dict(causal_query_spatial_dim=time) if kind == "causal" else {}
    return rf.dot_attention(q_, k_, v_, key_dim=feat, axis=keys, **causal)


def _attention_op(kind: str) -> Op:
    def inputs(la: Layout) -> Sequence[torch.Tensor]:
        lens = la.lens if kind in ("causal", "rel-pos") else la.lens[::-1]
        pos = values(2 * max(la.lens) - 1, la.feat, seed=la.seed + 7).to(la.low)
        return la.numbers(0), la.numbers(1, lens), la.numbers(2, lens), *([pos] if kind == "rel-pos" else [])

    return Op(
        f"attention, {kind}", functools.partial(_call_attention, kind), lambda la: (*la.dims[:3], la.other_dims[3]),
        functools.partial(_attention, kind), inputs, mask=lambda la: la.mask & _allowed(la, kind).any(-1),
        limit=1e17,  # energies, that is products of two, must stay in the range of float32, as in stock
    )  # fmt: skip


ATTENTION = tuple(_attention_op(kind) for kind in ("keys padded", "causal", "masked", "rel-pos"))


def _encoding(la: Layout) -> Tensor:
    return rf.sinusoidal_positional_encoding(spatial_dim=la.dims[2], feat_dim=la.dims[3], offset=1000)


def _rope(la: Layout, x: torch.Tensor) -> Tensor:
    source = la.tensor(x)
    return source._raw_backend.apply_rope(source, _encoding(la), la.dims[3])


def _rope_formula(la: Layout, x: torch.Tensor) -> torch.Tensor:
    encoding = references.sinusoidal(range(1000, 1000 + max(la.lens)), la.feat).to(la.low).double()
    sin, cos = encoding.chunk(2, -1)
    real, imag = x[..., 0::2], x[..., 1::2]
    return torch.stack((real * cos - imag * sin, real * sin + imag * cos), -1).flatten(-2)


ROPE = Op("RoPE", _rope, frame_dims, _rope_formula, stock=False)  # stock compiles its rotation, which takes long

OPS = (*NORMS, *ATTENTION, ROPE, *LOSSES, *SOFTMAX, *HELPERS)


class Numbers(NamedTuple):
    """The result where it counts, and the gradients of the inputs"""

    out: torch.Tensor
    grads: Sequence[torch.Tensor]


def run(op: Op, la: Layout, name: str) -> Numbers:
    """:return: of the op, within a :func:`common.setting` of the hooks; name "on" for its policy, else none"""
    leaves = [la.leaf(x) if x.ndim == 4 else x.clone().requires_grad_() for x in op.inputs(la)]
    rf.init_train_step_run_ctx(train_flag=True, step=0)
    policy = op.policy if name == "on" else False
    with rf.set_default_float_dtype_ctx(name_of(la.low)), rf.upcast.scope(policy):
        out = op.call(la, *leaves)
    out = (rf.unpack(out) if rf.is_packed(out) else out).copy_compatible_to_dims_raw(op.out(la))
    return backward(op, la, out, leaves)


def backward(op: Op, la: Layout, out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Numbers:
    """:return: out where it counts, and the gradients of the leaves, 0 where there is none"""
    out = out[op.mask(la)]
    if out.numel() > 0:
        upstream = values(*out.shape, seed=9).to(la.low).to(out.dtype)
        grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True, retain_graph=True)
    else:
        grads = [None] * len(leaves)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]
    return Numbers(out.detach(), [g[la.mask] if g.ndim == 4 else g for g in grads])
