"""
Cross entropy, CTC and the opt-in softmax through RETURNN, against float64, and beside stock RETURNN.
"""

from __future__ import annotations
import logging
import math
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import MODES, inside, name_of, seq_dim, setting, tensor, values
from tolerances import INPUT_GRAD, assert_close, assert_within_one_rounding, relative_error, tolerance

B, T, V, S = 3, 19, 37, 5
LENS, TARGET_LENS = [19, 11, 7], [5, 2, 0]
batch, vocab = Dim(B, name="batch"), Dim(V, name="vocab")
time = seq_dim("time", LENS, batch)
target_dim = seq_dim("target", TARGET_LENS, batch)
LOGITS = values(B, T, V, seed=1, std=4.0)
LABELS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
CTC_LABELS = torch.randint(0, V - 1, (B, S), generator=torch.Generator().manual_seed(3))
PROBS = torch.softmax(values(B, T, V, seed=4), -1)
GRAD = values(B, T, seed=5).abs() + 0.5
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]
WIDE = ["bf16", "f16", "amp-bf16"]


def _estimated(logits: torch.Tensor, kind: str) -> torch.Tensor:
    return {"logits": logits, "log-probs": logits.log_softmax(-1), "probs": (logits * 0.3).softmax(-1)}[kind]


def _reference_ce(estimated: torch.Tensor, target: torch.Tensor, kind: str) -> torch.Tensor:
    log_probs = {
        "logits": lambda x: x - x.exp().sum(-1, keepdim=True).log(),
        "log-probs": lambda x: x,
        "probs": torch.log,
    }
    log_probs = log_probs[kind](estimated)
    if target.is_floating_point():
        return -(target * log_probs).sum(-1)
    return -log_probs.gather(-1, target[..., None])[..., 0]


def _run_ce(x: torch.Tensor, target: torch.Tensor, kind: str, order=(0, 1, 2)):
    """loss [B, T], gradient in the order B, T, V"""
    dims = (batch, time, vocab)
    x = x.detach().permute(order).contiguous().requires_grad_(True)
    dense = target.is_floating_point()
    target_ = (
        tensor(target, batch, time, vocab)
        if dense
        else rf.convert_to_tensor(target, dims=(batch, time), sparse_dim=vocab)
    )
    out = rf.cross_entropy(
        estimated=tensor(x, *(dims[i] for i in order)), target=target_, axis=vocab, estimated_type=kind
    )
    raw = out.copy_compatible_to_dims_raw([batch, time])
    raw.backward(GRAD.to(raw.dtype))
    return raw.detach(), x.grad.permute([order.index(i) for i in range(3)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", ["logits", "log-probs", "probs"])
@pytest.mark.parametrize("mode", WIDE)
def test_cross_entropy(mode, kind, dense, order):
    mode = MODES[mode]
    x = _estimated(LOGITS, kind).to(mode.low)
    target = PROBS.to(mode.low) if dense else LABELS
    x64 = x.double().requires_grad_(True)
    reference = _reference_ce(x64, target.double() if dense else target, kind)
    # the incoming gradient has the dtype of the loss
    reference.backward(GRAD.float().double())
    with setting("on", mode):
        out, grad = _run_ce(x, target, kind, order)
    assert out.dtype == torch.float32 and grad.dtype == mode.low
    assert_close(out, reference.detach(), 1.05, what="loss")
    assert_close(grad, x64.grad, INPUT_GRAD, what="gradient")
    exact = kind == "log-probs" and not dense  # picked, nothing is computed
    if not mode.amp and not exact:
        with setting("off", mode):
            stock, _ = _run_ce(x, target, kind, order)
        assert stock.dtype == mode.low
        assert relative_error(stock, reference.detach()) > tolerance(reference.detach(), torch.float32, 1.05)


def test_dense_targets_and_float32_log_probs_under_autocast():
    """stock multiplies them with a matmul, which autocast runs in bf16"""
    log_probs = LOGITS.float().log_softmax(-1)
    reference = _reference_ce(log_probs.double(), PROBS.float().double(), "log-probs")
    errors = {}
    for name in ("off", "on"):
        with setting(name, MODES["amp-bf16"]):
            out, _ = _run_ce(log_probs, PROBS.float(), "log-probs")
        errors[name] = relative_error(out, reference)
    assert errors["on"] < 3e-7 < 1e-4 < errors["off"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cross_entropy_of_cases(dtype):
    """CASES.md: logits (10, 7.25, 0, -3)"""
    four = Dim(4, name="four")
    x = torch.tensor([10.0, 7.25, 0.0, -3.0], dtype=getattr(torch, dtype))
    target = rf.convert_to_tensor(torch.tensor(0), dims=(), sparse_dim=four)
    loss = {}
    for name in ("off", "on"):
        with setting(name):
            loss[name] = rf.cross_entropy(estimated=tensor(x, four), target=target, axis=four, estimated_type="logits")
    assert math.isclose(float(loss["on"].raw_tensor), 0.06201238451371431, rel_tol=2e-7)
    assert not math.isclose(float(loss["off"].raw_tensor), 0.06201238451371431, rel_tol=1e-3)


def test_forbidden_labels():
    x = LOGITS.to(torch.bfloat16)
    x[..., 3] = -math.inf
    with setting("on", MODES["bf16"]):
        out, grad = _run_ce(x, torch.where(LABELS == 3, 4, LABELS), "logits")
    assert torch.isfinite(out).all() and torch.isfinite(grad).all() and (grad[..., 3] == 0).all()


def _run_ctc(x: torch.Tensor, order=(0, 1, 2), targets=CTC_LABELS, **kwargs):
    dims = (batch, time, vocab)
    x = x.detach().permute(order).contiguous().requires_grad_(True)
    out = rf.ctc_loss(
        logits=tensor(x, *(dims[i] for i in order), feature_dim=vocab),
        targets=rf.convert_to_tensor(targets, dims=(batch, target_dim), sparse_dim=vocab),
        input_spatial_dim=time,
        targets_spatial_dim=target_dim,
        blank_index=V - 1,
        **kwargs,
    )
    raw = out.copy_compatible_to_dims_raw([batch])
    raw.backward(GRAD[:, 0].to(raw.dtype))
    return raw.detach(), x.grad.permute([order.index(i) for i in range(3)])


def _reference_ctc(x: torch.Tensor, label_loop: bool, max_approx: bool) -> torch.Tensor:
    """The forward recursion, one sequence after the other. label_loop=False: every frame ends a label (RNA)."""
    losses = []
    for b in range(B):
        log_probs = x[b] - x[b].exp().sum(-1, keepdim=True).log()
        labels = CTC_LABELS[b, : TARGET_LENS[b]].tolist()
        states = [V - 1] + [s for label in labels for s in (label, V - 1)]
        combine = (
            (lambda xs: torch.stack(xs).amax(0)) if max_approx else (lambda xs: torch.logsumexp(torch.stack(xs), 0))
        )
        alpha = {0: log_probs[0, V - 1]}
        if labels:
            alpha[1] = log_probs[0, labels[0]]
        for t in range(1, LENS[b]):
            new = {}
            for s, label in enumerate(states):
                before = [s, s - 1] if s % 2 == 0 or label_loop else [s - 1]
                if s % 2 and s >= 2 and (not label_loop or label != states[s - 2]):
                    before.append(s - 2)
                found = [alpha[p] for p in before if p in alpha]
                if found:
                    new[s] = combine(found) + log_probs[t, label]
            alpha = new
        ends = [alpha[s] for s in (len(states) - 1, len(states) - 2) if s in alpha and s >= 0]
        losses.append(-combine(ends))
    return torch.stack(losses)


CTC_KINDS = {
    "torch": {},
    "native": {"use_native_op": True},
    "max_approx": {"max_approx": True},
    "no_label_loop": {"label_loop": False},
}


@pytest.mark.parametrize("normalized", [False, True], ids=["logits", "log_probs"])
@pytest.mark.parametrize("kind", CTC_KINDS)
@pytest.mark.parametrize("mode", WIDE)
def test_ctc(mode, kind, normalized):
    mode, kwargs = MODES[mode], CTC_KINDS[kind]
    x = (LOGITS.log_softmax(-1) if normalized else LOGITS).to(mode.low)
    x64 = x.double().requires_grad_(True)
    reference = _reference_ctc(x64, kwargs.get("label_loop", True), kwargs.get("max_approx", False))
    reference.backward(GRAD[:, 0].float().double())
    with setting("on", mode):
        out, grad = _run_ctc(x, logits_normalized=normalized, **kwargs)
    assert out.dtype == torch.float32 and grad.dtype == mode.low
    if not normalized:  # rounded log-probs are no distribution: the reference normalises them again
        assert_close(out, reference.detach(), 1.05, float32=1e-6, what="loss")
        mask = inside(LENS)
        assert_close(grad[mask], x64.grad[mask], INPUT_GRAD, what="gradient")
        assert (grad[~mask] == 0).all()
    if mode.low == torch.bfloat16 and not normalized and kind != "max_approx":
        with setting("off", mode):
            stock, stock_grad = _run_ctc(x, **kwargs)
        assert relative_error(stock, reference.detach()) > 1e-5
        assert relative_error(stock_grad[mask], x64.grad[mask]) > 1.5 * tolerance(x64.grad[mask], mode.low, INPUT_GRAD)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_ctc_dim_order(order):
    x = LOGITS.to(torch.bfloat16)
    with setting("on", MODES["bf16"]):
        results = [_run_ctc(x, o) for o in ((0, 1, 2), order)]
    (loss, grad), (other_loss, other_grad) = results
    assert torch.allclose(loss, other_loss, rtol=1e-6)
    assert_within_one_rounding(grad, other_grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ctc_of_cases(dtype):
    """CASES.md: all logits 0, 4 frames, 3 labels, target [1]: -log(10 / 81)"""
    one, four, three, single = Dim(1, name="b"), None, Dim(3, name="three"), None
    four, single = seq_dim("four", [4], one), seq_dim("single", [1], one)
    with setting("on"):
        loss = rf.ctc_loss(
            logits=tensor(torch.zeros(1, 4, 3, dtype=getattr(torch, dtype)), one, four, three, feature_dim=three),
            targets=rf.convert_to_tensor(torch.tensor([[1]]), dims=(one, single), sparse_dim=three),
            input_spatial_dim=four,
            targets_spatial_dim=single,
            blank_index=2,
        )
    assert math.isclose(float(loss.raw_tensor[0]), -math.log(10 / 81), rel_tol=3e-7)


def test_ctc_target_longer_than_the_frames():
    """as zero_infinity: loss 0, gradient 0"""
    short = [2, 11, 7]
    frames = seq_dim("frames", short, batch)
    x = LOGITS[:, :11].to(torch.bfloat16).requires_grad_(True)
    with setting("on"):
        out = rf.ctc_loss(
            logits=tensor(x, batch, frames, vocab, feature_dim=vocab),
            targets=rf.convert_to_tensor(CTC_LABELS, dims=(batch, target_dim), sparse_dim=vocab),
            input_spatial_dim=frames,
            targets_spatial_dim=target_dim,
            blank_index=V - 1,
        )
    out.raw_tensor.sum().backward()
    assert out.raw_tensor[0] == 0 and (x.grad[0] == 0).all() and (out.raw_tensor[1:] > 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ctc_best_path(dtype):
    """the path is that of the float32 scores, also where rounding makes labels equal"""
    low = getattr(torch, dtype)
    x = (LOGITS * 0.05 + 40).to(low)
    paths = {}
    for name, raw in (("on", x), ("float32", x.float())):
        with setting("on"):
            path = rf.ctc_best_path(
                logits=tensor(raw, batch, time, vocab, feature_dim=vocab),
                targets=rf.convert_to_tensor(CTC_LABELS, dims=(batch, target_dim), sparse_dim=vocab),
                input_spatial_dim=time,
                targets_spatial_dim=target_dim,
                blank_index=V - 1,
            )
        assert path.sparse_dim == vocab
        paths[name] = path.copy_compatible_to_dims_raw([batch, time])[inside(LENS)]
    assert torch.equal(paths["on"], paths["float32"])


def test_several_batch_dims():
    beam = Dim(2, name="beam")
    raw = torch.stack([LOGITS, LOGITS.flip(-1)], 1).to(torch.bfloat16)
    targets = rf.convert_to_tensor(CTC_LABELS, dims=(batch, target_dim), sparse_dim=vocab)
    kwargs = dict(targets=targets, input_spatial_dim=time, targets_spatial_dim=target_dim, blank_index=V - 1)
    with setting("on"):
        both = rf.ctc_loss(logits=tensor(raw, batch, beam, time, vocab, feature_dim=vocab), **kwargs)
        each = [rf.ctc_loss(logits=tensor(raw[:, i], batch, time, vocab, feature_dim=vocab), **kwargs) for i in (0, 1)]
    both = both.copy_compatible_to_dims_raw([batch, beam])
    assert all(torch.allclose(both[:, i], each[i].raw_tensor, rtol=1e-6) for i in (0, 1))


@pytest.mark.parametrize("fixed", [{}, {"use_native_op": False}], ids=["native", "torch"])
def test_packed_is_padded(fixed):
    from returnn.frontend import _packed_backend

    allow = getattr(_packed_backend, "set_allowed_fallbacks", lambda ops: None)  # not in all releases
    allow(True)
    x = tensor(LOGITS.to(torch.bfloat16), batch, time, vocab, feature_dim=vocab)
    targets = rf.convert_to_tensor(CTC_LABELS, dims=(batch, target_dim), sparse_dim=vocab)
    labels = rf.convert_to_tensor(LABELS, dims=(batch, time), sparse_dim=vocab)
    with setting("on"):
        packed, results = rf.pack(x, dims=[batch, time]), []
        for logits in (x, packed):
            kwargs = dict(targets=targets, input_spatial_dim=time, targets_spatial_dim=target_dim, blank_index=V - 1)
            results.append(rf.ctc_loss(logits=logits, **kwargs, **fixed).raw_tensor)
            ce = rf.cross_entropy(estimated=logits, target=labels, axis=vocab, estimated_type="logits")
            if ce.raw_tensor.__class__ is not torch.Tensor:
                ce = rf.unpack(ce)
            results.append(ce.copy_compatible_to_dims_raw([batch, time])[inside(LENS)])
    allow(None)
    ctc, ce, packed_ctc, packed_ce = results
    assert packed_ctc.dtype == packed_ce.dtype == torch.float32
    assert torch.allclose(ctc, packed_ctc, rtol=1e-6) and torch.equal(ce, packed_ce)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("mode", ["bf16", "f16", "amp-bf16"])
def test_softmax_is_opt_in(op, mode):
    x = LOGITS.to(MODES[mode].low)
    func = getattr(rf, op)
    for options, dtype in [({op: True}, torch.float32), (True, x.dtype), ({op: False}, x.dtype)]:
        with setting("on", MODES[mode]), rf.upcast.scope(options):
            out = func(tensor(x, batch, time, vocab), axis=vocab).raw_tensor
        assert out.dtype == dtype
        if dtype == torch.float32:
            assert torch.equal(out, getattr(torch, op)(x.float(), -1))


def test_opt_in_softmax_with_stock_attention():
    """with attention off, the softmax inside must stay stock, or the weights could not be multiplied with bf16 values"""
    feat, kv = Dim(8, name="feat"), Dim(T, name="kv")
    q, k = (
        tensor(values(B, n, 8, seed=i).to(torch.bfloat16), batch, d, feat)
        for i, (n, d) in enumerate([(T, time), (T, kv)])
    )
    with setting("on", MODES["bf16"]):
        with rf.upcast.scope({"softmax": True, "attention": False}):
            out = rf.dot_attention(q, k, k, key_dim=feat, axis=kv)
        with rf.upcast.scope(False):
            stock = rf.dot_attention(q, k, k, key_dim=feat, axis=kv)
    assert torch.equal(out.raw_tensor, stock.raw_tensor)


@pytest.mark.parametrize("name", ["off", "on"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_stock_numbers_where_nothing_is_low_or_off(name, dtype):
    if name == "on" and dtype == "bfloat16":
        return
    x, results = LOGITS.to(getattr(torch, dtype)), []
    for setting_ in ("stock", name):
        with setting(setting_):
            results.append([*_run_ce(x, LABELS, "logits"), *_run_ce(x, PROBS.to(x.dtype), "log-probs"), *_run_ctc(x)])
    for stock, ours in zip(*results):
        assert stock.dtype == ours.dtype and torch.equal(stock, ours)


def test_rounded_log_probs_are_reported_once_by_name(caplog):
    from returnn_upcast.hooks import common

    common._said.clear()
    caplog.set_level(logging.WARNING, "returnn.frontend.upcast")
    x = LOGITS.log_softmax(-1).to(torch.bfloat16)
    with setting("on"):
        for _ in range(2):
            _run_ce(x, LABELS, "log-probs")
            _run_ctc(x, logits_normalized=True)
        _run_ce(x.float(), LABELS, "log-probs")
    messages = [r.message for r in caplog.records]
    assert len(messages) == 2
    assert "cross_entropy" in messages[0] and "ctc_loss" in messages[1]
    assert all("rf.upcast.log_softmax" in m and name_of(x.dtype) in m for m in messages)
