"""
Final projections in float32, and projection and cross entropy in one, on raw tensors, against float64.
"""

from __future__ import annotations
import functools
import pytest
import torch
import torch.nn.functional as F
import references_loss as references
from ops_loss_cases import DTYPES, F16, F32, F64, gradients, make_operands, randn, sparse_target
from tolerances import FLOAT32, INPUT_GRAD, PARAM_GRAD, PARAM_GRAD_FLOAT32, assert_close, assert_within_one_rounding
from tolerances import relative_error
from returnn_upcast.ops import linear_loss, loss
from returnn_upcast.ops.linear_loss import linear_cross_entropy, linear_f32


def _exact(operands):
    return [None if v is None else v.detach().double().requires_grad_() for v in operands]


def _check_gradients(operands, out, ref, exact):
    upstream = randn(*ref.shape, seed=5).float()
    names = ("x", "weight", "bias")
    grads, ref_grads = gradients(out, operands, upstream), gradients(ref, exact, upstream)
    for name, value, grad, ref_grad in zip(names, (v for v in operands if v is not None), grads, ref_grads):
        assert grad.dtype == value.dtype, name
        factor = INPUT_GRAD if name == "x" else PARAM_GRAD
        assert_close(grad, ref_grad, factor, float32=PARAM_GRAD_FLOAT32, what=f"gradient of {name}")


@pytest.mark.parametrize("with_bias", (True, False))
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((3, 5, 16), (16,), (4, 200, 64), (0, 16)), ids=str)
def test_linear_f32(shape, dtypes, with_bias: bool):
    x, weight, bias = make_operands(*shape, labels=300, dtypes=dtypes)
    operands = x, weight, bias if with_bias else None
    out, exact = linear_f32(*operands), _exact(operands)
    ref = exact[0] @ exact[1] + (exact[2] if with_bias else 0.0)
    assert out.dtype == F32 and out.shape == (*shape[:-1], 300)
    assert_close(out, ref.detach(), 1.02)
    _check_gradients(operands, out, ref, exact)
    if x.numel():
        low = x @ weight.to(x.dtype) + (bias.to(x.dtype) if with_bias else 0)
        assert relative_error(low, ref.detach()) > 100 * FLOAT32


def test_linear_f32_of_views_and_wide_dtypes():
    x, weight, bias = make_operands(6, 5, 16, labels=7)
    view = x.transpose(0, 1)[1:, ::2]
    assert_close(linear_f32(view, weight, bias), view.double() @ weight.double() + bias.double(), 1.02)
    for dtype in (F32, F64):
        x, weight, bias = make_operands(5, 16, labels=7, dtypes=(dtype, dtype))
        assert torch.equal(linear_f32(x, weight, bias), x @ weight + bias)
    assert linear_f32(x.detach().bfloat16(), weight, bias).dtype == F64


def _reference(operands, exact, target, smoothing: float, float32_logits: bool) -> torch.Tensor:
    x, weight, bias = operands
    if float32_logits:
        logits = exact[0] @ exact[1] + (0.0 if bias is None else exact[2])
    else:
        operand = references.rounded_to(exact[1], weight.detach().to(x.dtype))
        logits = references.rounded_to(exact[0] @ operand, x.detach() @ weight.detach().to(x.dtype))
        if bias is not None:  # as an rf.Linear: the sum is rounded once more
            logits = logits + exact[2]
            logits = references.rounded_to(logits, logits.detach().float().to(x.dtype))
    return references.smoothed_cross_entropy(logits, target, smoothing)


# labels, shape of x
SIZES = {"10": (10, (5, 7, 16)), "1000": (1000, (40, 32)), "50,000": (50_000, (30, 64)), "one row": (9, (16,))}


@pytest.mark.parametrize("smoothing, float32_logits", [(0.0, False), (0.0, True), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_linear_cross_entropy(size: str, dtypes, smoothing: float, float32_logits: bool):
    labels, shape = SIZES[size]
    operands, target = make_operands(*shape, labels=labels, dtypes=dtypes), sparse_target(labels, *shape[:-1])
    out = linear_cross_entropy(*operands, target, label_smoothing=smoothing, float32_logits=float32_logits)
    exact = _exact(operands)
    ref = _reference(operands, exact, target, smoothing, float32_logits)
    assert out.dtype == F32 and out.shape == shape[:-1]
    # In f16, a float32 sum that is close to the middle of two numbers may round to the other one than torch's.
    slack = 3e-6 if dtypes[0] == F16 and not float32_logits else FLOAT32
    assert_close(out, ref.detach(), 1.05, float32=slack)
    _check_gradients(operands, out, ref, exact)
    assert (out[target == -100] == 0).all()


def test_gradients_of_stock_are_further_off():
    """The gradient of the logits, rounded before the products of backward, costs more than the tolerance."""
    operands, target = make_operands(300, 64, labels=1000), sparse_target(1000, 300)
    exact = _exact(operands)
    x, weight, bias = operands
    out = F.cross_entropy((x @ weight + bias).float(), target, reduction="none")
    with pytest.raises(AssertionError, match="gradient of x"):
        _check_gradients(operands, out, _reference(operands, exact, target, 0.0, False), exact)


@pytest.mark.parametrize("sizes", [(400, 300, 5, 3), (1, 1, 10**6, 1)], ids=str)
@pytest.mark.parametrize("smoothing, float32_logits", [(0.0, False), (0.1, True)])
def test_blocks(smoothing: float, float32_logits: bool, sizes, monkeypatch):
    """Blocks of rows and of labels, none of equal size: the same numbers, and no logits beyond a block."""
    operands, target = make_operands(17, 3, 16, labels=130), sparse_target(130, 17, 3)
    func = functools.partial(linear_cross_entropy, label_smoothing=smoothing, float32_logits=float32_logits)
    upstream = randn(17, 3, seed=6)
    whole = func(*operands, target)
    whole_grads = gradients(whole, operands, upstream)
    for name, value in zip(("_FORWARD_NUMEL", "_BACKWARD_NUMEL", "_MAX_ROWS", "_MIN_ROWS"), sizes):
        monkeypatch.setattr(linear_loss, name, value)
    monkeypatch.setattr(linear_loss, "_MIN_LABELS", 1)
    sizes_seen = []
    logits_of = linear_loss._logits
    monkeypatch.setattr(linear_loss, "_logits", lambda *args: sizes_seen.append((v := logits_of(*args)).numel()) or v)
    out = func(*operands, target)
    grads = gradients(out, operands, upstream)
    assert len(sizes_seen) > 20 and max(sizes_seen) <= max(400, 130)
    for value, block in zip((whole, *whole_grads), (out, *grads)):
        assert_within_one_rounding(value, block)


def test_many_rows():
    """More than one block of rows in backward: the gradients of the parameters are accumulated in float32."""
    rows = linear_loss._MAX_ROWS + 5
    operands, target = make_operands(rows, 4, labels=6), sparse_target(6, rows)
    exact = _exact(operands)
    out = linear_cross_entropy(*operands, target)
    _check_gradients(operands, out, _reference(operands, exact, target, 0.0, False), exact)


def test_forbidden_labels_and_confident_rows():
    x, weight, bias = make_operands(9, 16, labels=12)
    target = torch.arange(9)
    with torch.no_grad():
        bias[10] = -torch.inf
    for float32_logits in (False, True):
        out = linear_cross_entropy(x, weight, bias, target, float32_logits=float32_logits)
        grads = gradients(out, (x, weight, bias), torch.ones(9))
        assert torch.isfinite(out).all() and all(torch.isfinite(g).all() for g in grads)
        assert (grads[1][:, 10] == 0).all() and grads[2][10] == 0
    assert linear_cross_entropy(x, weight, bias, torch.full((9,), 10)).isinf().all()
    peaked = torch.eye(16)[:9].bfloat16() * 16
    out = linear_cross_entropy(peaked.requires_grad_(), torch.eye(16).bfloat16(), None, target)
    exact = torch.tensor(15.0, dtype=F64) * torch.exp(torch.tensor(-16.0, dtype=F64))
    assert_close(out, exact.log1p().expand(9), 1.05)
    (grad,) = torch.autograd.grad(out.sum(), peaked)
    # 1 - p has no digits left in float32
    assert_close(grad.diagonal(), (-exact / (1 + exact)).expand(9).contiguous(), INPUT_GRAD)


@pytest.mark.parametrize("func", ("cross_entropy", "f32"))
def test_empty(func: str):
    x, weight, bias = make_operands(0, 16, labels=5)
    target = torch.zeros(0, dtype=torch.int64)
    out = linear_cross_entropy(x, weight, bias, target) if func == "cross_entropy" else linear_f32(x, weight, bias)
    grads = gradients(out, (x, weight, bias), torch.zeros(out.shape))
    assert out.shape[0] == 0 and all((g == 0).all() for g in grads)


def test_errors():
    x, weight, bias = make_operands(3, 16, labels=5)
    target = torch.zeros(3, dtype=torch.int64)
    for func in (linear_f32, lambda *args: linear_cross_entropy(*args, target)):
        with pytest.raises(ValueError, match=r"linear_.*weight must be \[in, out\].*\(5, 16\)"):
            func(x, weight.T, bias)
        with pytest.raises(ValueError, match=r"linear_.*bias must be \[5\].*\(4,\)"):
            func(x, weight, bias[1:])
    with pytest.raises(ValueError, match=r"target has shape \(2,\).*\(3,\)"):
        linear_cross_entropy(x, weight, bias, target[1:])
    with pytest.raises(IndexError, match="linear_cross_entropy: target 5 is out of bounds.*0 to 4"):
        linear_cross_entropy(x, weight, bias, target + 5)
    for smoothing in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"label_smoothing.*{smoothing}"):
            linear_cross_entropy(x, weight, bias, target, label_smoothing=smoothing)


def test_only_what_needs_a_gradient_gets_one():
    x, weight, bias = make_operands(7, 16, labels=40)
    target = sparse_target(40, 7)
    for func in (linear_f32, lambda *args: linear_cross_entropy(*args, target)):
        for wanted in (x, weight, bias):
            operands = [v if v is wanted else v.detach() for v in (x, weight, bias)]
            out = func(*operands)
            (grad,) = torch.autograd.grad(out.sum(), wanted)
            assert torch.equal(grad, torch.autograd.grad(func(x, weight, bias).sum(), wanted)[0])
        assert func(x, weight, None).shape == func(x, weight, bias).shape


def test_what_is_kept_for_backward():
    x, weight, bias = make_operands(50, 16, labels=400)
    own, saved = {v.data_ptr() for v in (x, weight, bias)}, []
    pack = lambda v: saved.append(v) or v
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        linear_cross_entropy(x, weight, bias, sparse_target(400, 50))
    assert sum(v.nbytes for v in saved if v.data_ptr() not in own) <= 50 * (3 * 4 + 8)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        linear_f32(x, weight, bias)
    assert all(v.data_ptr() in own for v in saved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("float32_logits", (False, True))
def test_cuda(dtypes, float32_logits: bool):
    operands, target = make_operands(200, 64, labels=3000, dtypes=dtypes), sparse_target(3000, 200)
    on_gpu = [v.detach().cuda().requires_grad_() for v in operands]
    exact = _exact(operands)
    out = linear_f32(*on_gpu)
    ref = exact[0] @ exact[1] + exact[2]
    assert_close(out.detach().cpu(), ref.detach(), 1.05, float32=1e-5)
    out = linear_cross_entropy(*on_gpu, target.cuda(), float32_logits=float32_logits)
    if not float32_logits:
        logits = on_gpu[0] @ on_gpu[1].to(dtypes[0]) + on_gpu[2].to(dtypes[0])
        ref = references.rounded_to(ref, logits.detach().cpu())
    ref = references.smoothed_cross_entropy(ref, target, 0.0)
    assert_close(out.detach().cpu(), ref.detach(), 1.05, float32=1e-5)
    upstream = randn(200, seed=5).float()
    for grad, ref_grad in zip(gradients(out, on_gpu, upstream.cuda()), gradients(ref, exact, upstream)):
        assert_close(grad.cpu(), ref_grad, PARAM_GRAD, float32=PARAM_GRAD_FLOAT32)


def test_agrees_with_the_single_ops():
    x, weight, bias = make_operands(7, 16, labels=40)
    target = sparse_target(40, 7)
    logits = x @ weight + bias
    assert torch.allclose(linear_cross_entropy(x, weight, bias, target), loss.cross_entropy(logits, target, axis=1))
    separate = loss.cross_entropy(linear_f32(x, weight, bias), target, axis=1)
    assert torch.allclose(linear_cross_entropy(x, weight, bias, target, float32_logits=True), separate)
