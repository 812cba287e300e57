"""
Cross entropy and the opt-in softmax through RETURNN, and what CTC shares with them, against float64 and stock RETURNN.
"""

from __future__ import annotations
import logging
import math
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import MODES, inside, name_of, setting, tensor, values
from loss_cases import B, GRAD, LENS, LOGITS, ORDERS, T, V, WIDE, batch, ctc_args, run_ctc, time, vocab
from tolerances import INPUT_GRAD, assert_close, relative_error, tolerance

LABELS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
PROBS = torch.softmax(values(B, T, V, seed=4), -1)


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


@pytest.mark.parametrize("fixed", [{}, {"use_native_op": False}], ids=["native", "torch"])
def test_packed_is_padded(fixed):
    from returnn.frontend import _packed_backend

    allow = getattr(_packed_backend, "set_allowed_fallbacks", lambda ops: None)  # not in all releases
    allow(True)
    x = tensor(LOGITS.to(torch.bfloat16), batch, time, vocab, feature_dim=vocab)
    labels = rf.convert_to_tensor(LABELS, dims=(batch, time), sparse_dim=vocab)
    with setting("on"):
        packed, results = rf.pack(x, dims=[batch, time]), []
        for logits in (x, packed):
            results.append(rf.ctc_loss(logits=logits, **ctc_args(), **fixed).raw_tensor)
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
            results.append([*_run_ce(x, LABELS, "logits"), *_run_ce(x, PROBS.to(x.dtype), "log-probs"), *run_ctc(x)])
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
            run_ctc(x, logits_normalized=True)
        _run_ce(x.float(), LABELS, "log-probs")
    messages = [r.message for r in caplog.records]
    assert len(messages) == 2
    assert "cross_entropy" in messages[0] and "ctc_loss" in messages[1]
    assert all("rf.upcast.log_softmax" in m and name_of(x.dtype) in m for m in messages)
