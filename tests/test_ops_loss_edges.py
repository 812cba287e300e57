"""
The losses on raw tensors at the edges: NaN and infinity, confident and ignored rows, nothing at all, wide and mixed
dtypes, errors.
"""

from __future__ import annotations
import math
import pytest
import torch
import torch.nn.functional as F
import references_loss as references
from ops_loss_cases import KINDS, as_leaf, make_target, randn, random_labels
from tolerances import assert_close
from returnn_upcast.ops import loss


def test_confident_rows():
    """Losses and gradients below the spacing of float32 at 1, each for itself."""
    logits = torch.tensor([[20.0, 0.0], [9.0, 1.0], [30.0, -20.0], [2.0, 2.0]]).half().requires_grad_()
    target = torch.zeros(4, dtype=torch.int64)
    out = loss.cross_entropy(logits, target, axis=1)
    gap = logits.detach().double()[:, 1] - logits.detach().double()[:, 0]
    assert ((out.detach().double() - gap.exp().log1p()).abs() <= 2e-7 * gap.exp().log1p()).all()
    assert math.isclose(float(torch.exp(-out[1].detach().double())), 0.99966465, rel_tol=1e-8)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    exact = -gap.exp() / (1 + gap.exp())
    assert torch.equal(grad[:, 0], exact.half()) and grad[1, 0] != 0


INF = math.inf
SPECIAL = {
    "forbidden label": [1.0, 2.0, -INF],
    "all forbidden": [-INF, -INF, -INF],
    "inf": [INF, 0.0, 1.0],
    "nan": [0.0, math.nan, 1.0],
    "ties": [3.0, 3.0, 3.0],
    "largest": [65504.0, -65504.0, 0.0],
    "zeros": [0.0, -0.0, 0.0],
}


@pytest.mark.parametrize("row", SPECIAL)
@pytest.mark.parametrize("target", [0, 1, 2, -100, (0.5, 0.5, 0.0), (1.0, 0.0, 0.0)], ids=str)
def test_nan_and_inf_are_where_cross_entropy_has_them(row: str, target):
    """Also 0 * -inf = NaN for dense targets: so does F.cross_entropy."""
    logits = torch.tensor([SPECIAL[row], [1.0, 2.0, 3.0]]).half().requires_grad_()
    exact = as_leaf(logits, torch.float64)
    target = torch.tensor([target, (0.0, 1.0, 0.0) if isinstance(target, tuple) else 1])
    out = loss.cross_entropy(logits, target, axis=1)
    ref = F.cross_entropy(exact, target if target.ndim == 1 else target.double(), reduction="none")
    (grad,), (ref_grad,) = torch.autograd.grad(out.sum(), logits), torch.autograd.grad(ref.sum(), exact)
    assert torch.allclose(out.double(), ref, rtol=3e-7, atol=0, equal_nan=True)
    assert torch.allclose(grad.double(), ref_grad, rtol=1e-3, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("vocab", (7, 20_000))
def test_ignored_rows(vocab: int):
    logits, target = (randn(6, vocab) * 4).bfloat16().requires_grad_(), random_labels(vocab, 6)
    target[[1, 4]] = -100
    for func, reference in [
        (loss.cross_entropy, references.cross_entropy),
        (loss.nll_from_log_probs, references.nll),
    ]:
        out = func(logits, target, axis=1)
        (grad,) = torch.autograd.grad(out.sum(), logits)
        assert (out[[1, 4]] == 0).all() and (grad[[1, 4]] == 0).all() and (grad[[0, 2, 3, 5]] != 0).any(1).all()
        ref = torch.where(target == -100, 0.0, reference(logits.detach().double(), target.clamp_min(0), 1))
        assert_close(out, ref, 1.05)


def test_empty_and_single_label():
    for func in (loss.cross_entropy, loss.nll_from_log_probs):
        logits = torch.zeros(0, 5, dtype=torch.bfloat16, requires_grad=True)
        for target in (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5)):
            out = func(logits, target, axis=1)
            assert out.shape == (0,) and torch.autograd.grad(out.sum(), logits)[0].shape == (0, 5)
    logits = as_leaf(randn(4, 1), torch.bfloat16)
    for target in (torch.zeros(4, dtype=torch.int64), torch.ones(4, 1)):
        out = loss.cross_entropy(logits, target, axis=1)
        assert (out == 0).all() and (torch.autograd.grad(out.sum(), logits)[0] == 0).all()
    assert loss.log_softmax(torch.zeros(0, 5).half(), axis=1).shape == (0, 5)
    assert loss.ctc_log_probs(torch.zeros(3, 0, 5).half()).shape == (3, 0, 5)


def test_errors():
    logits = torch.zeros(3, 4, dtype=torch.bfloat16)
    for func in (loss.cross_entropy, loss.nll_from_log_probs):
        for label in (4, -1, -99):
            with pytest.raises(IndexError, match=f"{func.__name__}.* {label} is out of bounds.*0 to 3"):
                func(logits, torch.tensor([0, label, -100]), axis=1)
        for target in (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3), torch.zeros(3)):
            with pytest.raises(ValueError, match=f"{func.__name__}.*target has shape.*must have"):
                func(logits, target, axis=1)
        for axis in (2, -3):
            with pytest.raises(IndexError, match=f"{func.__name__}.*axis {axis}"):
                func(logits, torch.zeros(3, dtype=torch.int64), axis=axis)
    with pytest.raises(ValueError, match=r"ctc_log_probs.*\[T, B, C\].*\(3, 4\)"):
        loss.ctc_log_probs(logits)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("kind", KINDS)
def test_wide_dtypes_pass(kind: str, dtype: torch.dtype):
    logits = as_leaf(randn(3, 9) * 4, dtype)
    target = make_target(kind, (3, 9), 1, dtype)
    out, stock = loss.cross_entropy(logits, target, axis=1), F.cross_entropy(logits, target, reduction="none")
    assert torch.equal(out, stock) and out.dtype == dtype
    assert torch.equal(*(torch.autograd.grad(v.sum(), logits)[0] for v in (out, stock)))
    assert torch.equal(loss.log_softmax(logits, axis=1), logits.log_softmax(1))
    assert loss.nll_from_log_probs(logits.log_softmax(1), target, axis=1).dtype == dtype


def test_mixed_dtypes():
    logits = randn(3, 9).bfloat16()
    for target_dtype in (torch.float16, torch.float32, torch.float64):
        target = make_target("dense", (3, 9), 1, target_dtype).requires_grad_()
        for func in (loss.cross_entropy, loss.nll_from_log_probs):
            out = func(logits, target, axis=1)
            assert out.dtype == torch.promote_types(target_dtype, torch.float32)
            assert torch.autograd.grad(out.sum(), target)[0].dtype == target_dtype
    out = loss.cross_entropy(logits, torch.zeros(3, dtype=torch.int32), axis=1)
    assert torch.equal(out, loss.cross_entropy(logits, torch.zeros(3, dtype=torch.int64), axis=1))
