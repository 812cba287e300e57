"""
The op table as properties see it: RETURNN's call beside its float64 formula, on one layout of [batch, beam, time, feature].
"""

from __future__ import annotations
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple
import dataclasses
import functools
import math
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
import references
import references_loss
from common import inside, name_of, seq_dim, tensor, values

GROUPS, STD = 4, 2.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """
    :param lens: of the sequences
    :param beam: size of an extra dim
    :param feat: number of features or labels
    :param order: of the dims batch, beam, time, feature in memory
    :param view: the input is a part of a larger tensor
    :param low: dtype
    :param special: what is put into some places inside of the sequences
    :param seed: of the numbers and places
    """

    lens: Tuple[int, ...]
    low: torch.dtype
    beam: int = 1
    feat: int = 8
    order: Tuple[int, ...] = (0, 1, 2, 3)
    view: bool = False
    special: Optional[float] = None
    seed: int = 0

    @functools.cached_property
    def dims(self) -> Tuple[Dim, ...]:
        """:return: batch, beam, time, feature"""
        batch = Dim(len(self.lens), name="batch")
        return batch, Dim(self.beam, name="beam"), seq_dim("time", self.lens, batch), Dim(self.feat, name="feat")

    @functools.cached_property
    def other_dims(self) -> Tuple[Dim, ...]:
        """:return: the same, with another time and feature dim of the same sizes"""
        batch, beam, _, feat = self.dims
        return batch, beam, seq_dim("other", self.lens[::-1], batch), Dim(self.feat, name="other_feat")

    @property
    def shape(self) -> Tuple[int, ...]:
        """:return: of an input"""
        return len(self.lens), self.beam, max(self.lens), self.feat

    @property
    def mask(self) -> torch.Tensor:
        """:return: bool [batch, beam, time], True inside of the sequences"""
        return inside(self.lens)[:, None].expand(-1, self.beam, -1)

    def numbers(self, index: int, lens: Optional[Sequence[int]] = None, std: float = STD) -> torch.Tensor:
        """:return: [batch, beam, time, feature] in low, with the special value in some places of the sequences"""
        x = values(*self.shape, seed=self.seed + index, std=std).to(self.low)
        if self.special is not None:
            places = torch.rand(self.shape, generator=torch.Generator().manual_seed(self.seed + 50 + index)) < 0.04
            x[places & inside(lens or self.lens)[:, None, :, None]] = self.special
        return x

    def labels(self, index: int = 0, num: Optional[int] = None) -> torch.Tensor:
        """:return: [batch, beam, time] below num"""
        generator = torch.Generator().manual_seed(self.seed + 90 + index)
        return torch.randint(0, num or self.feat, self.shape[:-1], generator=generator)

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        """:return: x in the memory of the layout, [batch, beam, time, feature], to be differentiated"""
        moved = x.permute(self.order)
        memory = torch.empty([n + self.view for n in moved.shape], dtype=x.dtype)
        moved = memory[(slice(int(self.view), None),) * 4].copy_(moved)
        return moved.permute([self.order.index(i) for i in range(4)]).requires_grad_()

    def tensor(self, leaf: torch.Tensor, dims: Optional[Sequence[Dim]] = None, feature: bool = False) -> Tensor:
        """:return: leaf, its dims in the order that they have in memory"""
        dims = dims or self.dims
        return tensor(
            leaf.permute(self.order), *(dims[i] for i in self.order), feature_dim=dims[-1] if feature else None
        )


@dataclasses.dataclass(frozen=True)
class Op:
    """
    :param call: of the layout and the leaves -> tensor
    :param out: of the layout -> dims of the result
    :param formula: of the layout and the inputs in float64 -> the raw result. Maybe several, that treat differently
        what is multiplied with a weight of zero: the op may do as any of them
    :param inputs: of the layout -> low-precision inputs
    :param mask: of the layout -> bool, where the result counts
    :param limit: largest magnitude of bf16 for which float32 is as float64
    :param stock: compare with stock RETURNN as well
    """

    name: str
    call: Callable[..., Tensor]
    out: Callable[[Layout], Sequence[Dim]]
    formula: Callable[..., Any]
    inputs: Callable[[Layout], Sequence[torch.Tensor]] = lambda la: (la.numbers(0),)
    mask: Callable[[Layout], torch.Tensor] = lambda la: la.mask
    policy: Any = True
    limit: float = math.inf
    stock: bool = True

    def __str__(self) -> str:
        return self.name


def _frames(la: Layout) -> Sequence[Dim]:
    return la.dims


def _rows(la: Layout) -> Sequence[Dim]:
    return la.dims[:3]


def _flat(func: Callable, la: Layout, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """:return: func of [batch * beam, time, feature] and the lengths"""
    lens = [n for n in la.lens for _ in range(la.beam)]
    return func(x.flatten(0, 1), {}, lens=lens, **kwargs).reshape(x.shape)


# Squares of what is larger overflow in float32: rms_norm gives zeros there as in stock, the others NaN, as stock does.
_SQUARES = 1e17


def _norm(name: str, call: Callable, formula: Callable) -> Op:
    return Op(name, lambda la, x: call(la.tensor(x), *la.dims[2:]), _frames, formula, limit=_SQUARES)


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


ROPE = Op("RoPE", _rope, _frames, _rope_formula, stock=False)  # stock compiles its rotation, which takes long


def _estimated(kind: str, la: Layout) -> torch.Tensor:
    x = la.numbers(0).double()
    special = torch.zeros_like(x, dtype=torch.bool)
    if la.special is not None:
        special = x.isnan() if math.isnan(la.special) else x == torch.tensor(la.special).to(la.low).double()
    usual = torch.where(special, 0.0, x)
    usual = {"logits": usual, "log-probs": usual.log_softmax(-1), "probs": usual.softmax(-1)}[kind]
    return torch.where(special, x, usual).to(la.low)


def _targets(dense: bool, la: Layout) -> torch.Tensor:
    return values(*la.shape, seed=la.seed + 8).softmax(-1).to(la.low) if dense else la.labels()


def _cross_entropy(helper: bool, kind: str, dense: bool, la: Layout, x: torch.Tensor) -> Tensor:
    target = _targets(dense, la)
    target = (
        tensor(target, *la.dims) if dense else rf.convert_to_tensor(target, dims=la.dims[:3], sparse_dim=la.dims[3])
    )
    func = rf.upcast.cross_entropy if helper else rf.cross_entropy
    return func(estimated=la.tensor(x), target=target, axis=la.dims[3], estimated_type=kind)


def _nll(kind: str, dense: bool, la: Layout, x: torch.Tensor) -> torch.Tensor:
    log_probs = {"logits": lambda: x.log_softmax(-1), "log-probs": lambda: x, "probs": lambda: x.log()}[kind]()
    target = _targets(dense, la)
    if dense:
        return -(target.double() * log_probs).sum(-1)
    return -log_probs.gather(-1, target[..., None])[..., 0]


def _cross_entropy_op(kind: str, dense: bool, helper: bool = False) -> Op:
    args = kind, dense
    return Op(
        f"{'rf.upcast.' if helper else ''}cross_entropy, {kind}, {'dense' if dense else 'sparse'}",
        functools.partial(_cross_entropy, helper, *args), _rows, functools.partial(_nll, *args),
        lambda la: (_estimated(kind, la),), policy=not helper,
    )  # fmt: skip


def _ctc_kwargs(la: Layout) -> Dict[str, Any]:
    batch, beam, time, feat = la.dims
    labels = seq_dim("labels", [min(n, 2) for n in la.lens], batch)
    raw = la.labels(1, la.feat - 1)[:, :, :2]
    raw = torch.cat([raw] * 2, -1)[:, :, : min(max(la.lens), 2)]
    targets = rf.convert_to_tensor(raw, dims=(batch, beam, labels), sparse_dim=feat)
    return dict(targets=targets, input_spatial_dim=time, targets_spatial_dim=labels, blank_index=la.feat - 1)


def _ctc(helper: bool, la: Layout, x: torch.Tensor) -> Tensor:
    func = rf.upcast.ctc_loss if helper else rf.ctc_loss
    return func(logits=la.tensor(x, feature=True), **_ctc_kwargs(la))


def _ctc_formula(la: Layout, x: torch.Tensor) -> torch.Tensor:
    """As of RETURNN: what has no path (loss inf) counts 0"""
    labels, losses = la.labels(1, la.feat - 1), []
    for b, n in enumerate(la.lens):
        for beam in range(la.beam):
            log_probs = x[b, beam, :n].log_softmax(-1)
            if log_probs.isnan().any():  # all paths go through that frame
                losses.append((log_probs * math.nan).sum())
                continue
            loss = (
                references_loss.ctc(log_probs, labels[b, beam, : min(n, 2)].tolist(), la.feat - 1) if n else x.sum() * 0
            )
            losses.append(torch.where(torch.isinf(loss), 0.0, loss))
    loss = torch.stack(losses).reshape(len(la.lens), la.beam)
    return loss, torch.where(loss.isnan(), loss.nan_to_num(), loss)  # torch's recursion may take NaN for no path


def _linear(la: Layout) -> rf.Linear:
    batch, beam, time, feat = la.dims
    linear = rf.Linear(feat, la.other_dims[3])
    for i, param in enumerate((linear.weight, linear.bias)):
        param.raw_tensor.data.copy_(values(*param.raw_tensor.shape, seed=30 + i).to(la.low))
    return linear


def _linear_formula(la: Layout, x: torch.Tensor) -> torch.Tensor:
    linear = _linear(la)
    return x @ linear.weight.raw_tensor.detach().double() + linear.bias.raw_tensor.detach().double()


def _linear_cross_entropy(la: Layout, x: torch.Tensor) -> Tensor:
    target = rf.convert_to_tensor(la.labels(), dims=la.dims[:3], sparse_dim=la.other_dims[3])
    return rf.upcast.linear_cross_entropy(_linear(la), la.tensor(x), target=target, float32_logits=True)


def _softmax_op(name: str, axis: int) -> Op:
    helper = name.startswith("upcast.")
    func = name.partition(".")[2] or name

    def call(la: Layout, x: torch.Tensor) -> Tensor:
        return getattr(rf.upcast if helper else rf, func)(la.tensor(x), axis=la.dims[axis])

    def formula(la: Layout, x: torch.Tensor) -> torch.Tensor:
        raw = torch.logsumexp if reduces else getattr(torch, func)
        # RETURNN masks with -inf, in logsumexp with the lowest number
        masks = (-math.inf, torch.finfo(torch.float32).min) if reduces else (-math.inf,)
        return tuple(raw(x.masked_fill(~la.mask[..., None], value) if axis == 2 else x, axis) for value in masks)

    reduces = func == "reduce_logsumexp"
    return Op(
        f"{name}, {'features' if axis == 3 else 'time'}", call,
        lambda la: [d for i, d in enumerate(la.dims) if i != axis or not reduces], formula,
        # over no frames, there is no number
        mask=lambda la: la.mask.any(2) if reduces and axis == 2 else la.mask,
        policy=False if helper else {func: True},
    )  # fmt: skip


LOSSES = (
    *(_cross_entropy_op(kind, dense) for kind in ("logits", "log-probs", "probs") for dense in (False, True)),
    *(_cross_entropy_op("logits", dense, helper=True) for dense in (False, True)),
    *(
        Op(
            name, functools.partial(_ctc, helper), lambda la: la.dims[:2], _ctc_formula,
            mask=lambda la: la.mask.any(2), policy=not helper, limit=1e35,  # sums over frames
        )
        for name, helper in (("ctc_loss", False), ("rf.upcast.ctc_loss", True))
    ),
)  # fmt: skip
SOFTMAX = tuple(
    _softmax_op(name, axis)
    for name in ("softmax", "log_softmax", "upcast.softmax", "upcast.log_softmax", "upcast.reduce_logsumexp")
    for axis in (3, 2)
)
HELPERS = (
    Op("rf.upcast.float32", lambda la, x: rf.upcast.float32(la.tensor(x)), _frames, lambda la, x: x, policy=False),
    Op(
        "rf.upcast.linear", lambda la, x: rf.upcast.linear(_linear(la), la.tensor(x)),
        lambda la: (*la.dims[:3], la.other_dims[3]), _linear_formula, policy=False,
        limit=1e37,  # the sum of products must stay in the range of float32
    ),
    Op(
        "rf.upcast.linear_cross_entropy", _linear_cross_entropy, _rows,
        lambda la, x: -_linear_formula(la, x).log_softmax(-1).gather(-1, la.labels()[..., None])[..., 0], policy=False,
        limit=1e37,
    ),
)  # fmt: skip
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
