"""
The losses, softmax and helpers of the table in :mod:`property_cases`.
"""

from __future__ import annotations
from typing import Any, Dict
import functools
import math
import torch
import returnn.frontend as rf
from returnn.tensor import Tensor
import references_loss
from common import seq_dim, tensor, values
from property_layouts import Layout, Op, frame_dims, row_dims


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
        functools.partial(_cross_entropy, helper, *args), row_dims, functools.partial(_nll, *args),
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
    Op("rf.upcast.float32", lambda la, x: rf.upcast.float32(la.tensor(x)), frame_dims, lambda la, x: x, policy=False),
    Op(
        "rf.upcast.linear", lambda la, x: rf.upcast.linear(_linear(la), la.tensor(x)),
        lambda la: (*la.dims[:3], la.other_dims[3]), _linear_formula, policy=False,
        limit=1e37,  # the sum of products must stay in the range of float32
    ),
    Op(
        "rf.upcast.linear_cross_entropy", _linear_cross_entropy, row_dims,
        lambda la, x: -_linear_formula(la, x).log_softmax(-1).gather(-1, la.labels()[..., None])[..., 0], policy=False,
        limit=1e37,
    ),
)  # fmt: skip
