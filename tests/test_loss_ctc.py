"""
CTC through RETURNN, against float64, and beside stock RETURNN.
"""

from __future__ import annotations
import math
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import MODES, inside, seq_dim, setting, tensor
from loss_cases import B, CTC_LABELS, GRAD, LENS, LOGITS, ORDERS, TARGET_LENS, V, WIDE
from loss_cases import batch, ctc_args, run_ctc, time, vocab
from tolerances import INPUT_GRAD, assert_close, assert_within_one_rounding, relative_error, tolerance


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
        out, grad = run_ctc(x, logits_normalized=normalized, **kwargs)
    assert out.dtype == torch.float32 and grad.dtype == mode.low
    if not normalized:  # rounded log-probs are no distribution: the reference normalises them again
        assert_close(out, reference.detach(), 1.05, float32=1e-6, what="loss")
        mask = inside(LENS)
        assert_close(grad[mask], x64.grad[mask], INPUT_GRAD, what="gradient")
        assert (grad[~mask] == 0).all()
    if mode.low == torch.bfloat16 and not normalized and kind != "max_approx":
        with setting("off", mode):
            stock, stock_grad = run_ctc(x, **kwargs)
        assert relative_error(stock, reference.detach()) > 1e-5
        assert relative_error(stock_grad[mask], x64.grad[mask]) > 1.5 * tolerance(x64.grad[mask], mode.low, INPUT_GRAD)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_ctc_dim_order(order):
    x = LOGITS.to(torch.bfloat16)
    with setting("on", MODES["bf16"]):
        results = [run_ctc(x, o) for o in ((0, 1, 2), order)]
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
        out = rf.ctc_loss(logits=tensor(x, batch, frames, vocab, feature_dim=vocab), **ctc_args(frames))
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
            path = rf.ctc_best_path(logits=tensor(raw, batch, time, vocab, feature_dim=vocab), **ctc_args())
        assert path.sparse_dim == vocab
        paths[name] = path.copy_compatible_to_dims_raw([batch, time])[inside(LENS)]
    assert torch.equal(paths["on"], paths["float32"])


def test_several_batch_dims():
    beam = Dim(2, name="beam")
    raw = torch.stack([LOGITS, LOGITS.flip(-1)], 1).to(torch.bfloat16)
    with setting("on"):
        kwargs = ctc_args()
        both = rf.ctc_loss(logits=tensor(raw, batch, beam, time, vocab, feature_dim=vocab), **kwargs)
        each = [rf.ctc_loss(logits=tensor(raw[:, i], batch, time, vocab, feature_dim=vocab), **kwargs) for i in (0, 1)]
    both = both.copy_compatible_to_dims_raw([batch, beam])
    assert all(torch.allclose(both[:, i], each[i].raw_tensor, rtol=1e-6) for i in (0, 1))
