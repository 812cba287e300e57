"""
Cross entropy, log_softmax and CTC on raw tensors, against float64.
"""

from __future__ import annotations
import math
import pytest
import torch
import torch.nn.functional as F
import references_loss as references
import tolerances
from ops_loss_cases import KINDS, LOW, as_leaf, make_target, randn, random_labels
from tolerances import FLOAT32, INPUT_GRAD, assert_close, relative_error, tolerance
from returnn_upcast.ops import loss


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double() if x.is_floating_point() else x


def _strides(x: torch.Tensor):
    return [stride for size, stride in zip(x.shape, x.stride()) if size != 1]


def _check_against(func, reference, logits: torch.Tensor, target: torch.Tensor, axis: int, naive=None):
    """Values and gradients of func(logits, target, axis) within their tolerances; those of naive not."""
    logits, exact = as_leaf(logits, logits.dtype), as_leaf(logits, torch.float64)
    target_exact = _double(target)
    inputs, exact_inputs = [logits], [exact]
    if target.is_floating_point():
        target, target_exact = as_leaf(target, target.dtype), target_exact.requires_grad_()
        inputs, exact_inputs = [logits, target], [exact, target_exact]
    out, ref = func(logits, target, axis=axis), reference(exact, target_exact, axis)
    upstream = randn(*ref.shape, seed=4).abs() + 0.1
    grads = torch.autograd.grad(out, inputs, upstream.float())
    ref_grads = torch.autograd.grad(ref, exact_inputs, upstream.float().double())
    assert out.dtype == torch.float32 and [g.dtype for g in grads] == [x.dtype for x in inputs]
    assert_close(out, ref.detach(), tolerances.OUTPUT, what="loss")
    for name, grad, ref_grad in zip(("logits", "target"), grads, ref_grads):
        assert_close(grad, ref_grad, INPUT_GRAD, what=f"gradient of {name}")
    if func is loss.cross_entropy:
        assert _strides(grads[0]) == _strides(logits)  # nothing is copied into another layout
    if naive is not None:
        bad = naive(logits, target, axis=axis).detach()
        assert relative_error(bad, ref.detach()) > 100 * FLOAT32


def _naive(logits, target, *, axis):
    logits = logits.movedim(axis, 1)
    target = target.movedim(axis, 1) if target.is_floating_point() else target
    return F.cross_entropy(logits, target, reduction="none")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("vocab", (10, 1000, 50_000))
def test_cross_entropy(vocab: int, dtype: torch.dtype, kind: str):
    logits = (randn(40, vocab) * 4).to(dtype)
    target = make_target(kind, logits.shape, 1, dtype)
    _check_against(loss.cross_entropy, references.cross_entropy, logits, target, 1, _naive)


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_of_256_000(kind: str):
    logits = (randn(3, 256_000) * 4).bfloat16()
    target = make_target(kind, logits.shape, -1, torch.bfloat16)
    _check_against(loss.cross_entropy, references.cross_entropy, logits, target, -1, _naive)


# shape, label axis, order of the dims in memory
LAYOUTS = {
    "labels last": ((3, 4, 11), 2, (0, 1, 2)),
    "labels first": ((11, 3, 4), 0, (0, 1, 2)),
    "labels between": ((3, 11, 4), -2, (0, 1, 2)),
    "time-major view": ((3, 4, 11), -1, (1, 0, 2)),
    "labels outermost in memory": ((3, 4, 11), 2, (2, 1, 0)),
    "one row": ((11,), 0, (0,)),
    "four dims": ((2, 3, 11, 4), 2, (3, 0, 2, 1)),
    "single frame": ((1, 11, 4), 1, (2, 0, 1)),
    "many labels, not last": ((2, 9_000, 3), 1, (0, 1, 2)),
    "many labels, first": ((20_000, 5), 0, (0, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_label_axis_and_memory_order(layout: str, kind: str):
    shape, axis, order = LAYOUTS[layout]
    logits = (randn(*shape) * 4).bfloat16().permute(order).contiguous()
    logits = logits.permute([order.index(i) for i in range(len(order))])
    target = make_target(kind, shape, axis, torch.bfloat16)
    for func, reference in [
        (loss.cross_entropy, references.cross_entropy),
        (loss.nll_from_log_probs, references.nll),
    ]:
        _check_against(func, reference, logits, target, axis)


def test_slices_and_expanded_logits():
    logits, target = (randn(5, 3, 13) * 4).bfloat16()[:, 1:, :11], random_labels(11, 5, 2)
    assert_close(loss.cross_entropy(logits, target, axis=-1), references.cross_entropy(logits.double(), target, -1), 1)
    expanded = logits[:1].expand(5, 2, 11)
    ref = references.cross_entropy(expanded.double(), target, -1)
    assert_close(loss.cross_entropy(expanded, target, axis=-1), ref, 1.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW)
def test_mean_of_1000(dtype: torch.dtype, kind: str):
    logits = (randn(20, 300) * 8 + 1000).to(dtype)
    target = make_target(kind, logits.shape, 1, dtype)
    _check_against(loss.cross_entropy, references.cross_entropy, logits, target, 1, _naive)
    _check_log_softmax(logits, 1)


def test_small_cases():
    """Of CASES.md: logits (10, 7.25, 0, -3)"""
    right = torch.tensor([-0.0620123845137143, -2.8120123845137143, -10.0620123845137143, -13.0620123845137143])
    for dtype in LOW:
        logits = torch.tensor([10, 7.25, 0, -3], dtype=dtype)
        value = loss.cross_entropy(logits, torch.tensor(0), axis=0)
        assert value.shape == () and abs(float(value) - 0.06201238451371431) < 1e-8
        assert torch.allclose(loss.log_softmax(logits, axis=0), right, rtol=FLOAT32, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (*LOW, torch.float32))
def test_nll_from_log_probs(dtype: torch.dtype, kind: str):
    log_probs = randn(20, 400).log_softmax(1).to(dtype)
    _check_against(loss.nll_from_log_probs, references.nll, log_probs, make_target(kind, (20, 400), 1, dtype), 1)


def _check_log_softmax(x: torch.Tensor, axis: int):
    x, exact = as_leaf(x, x.dtype), as_leaf(x, torch.float64)
    out, ref = loss.log_softmax(x, axis=axis), references.log_softmax(exact, axis)
    upstream = randn(*x.shape, seed=5).float()
    (grad,), (ref_grad,) = torch.autograd.grad(out, x, upstream), torch.autograd.grad(ref, exact, upstream.double())
    assert out.dtype == torch.float32 and grad.dtype == x.dtype
    assert_close(out, ref.detach(), tolerances.OUTPUT)
    assert_close(grad, ref_grad, INPUT_GRAD)
    limit = tolerance(ref.detach(), torch.float32, tolerances.OUTPUT)
    assert relative_error(torch.log_softmax(x, axis), ref.detach()) > 100 * limit


@pytest.mark.parametrize("dtype", LOW)
def test_log_softmax(dtype: torch.dtype):
    for shape, axis in [((3, 5, 7), -1), ((3, 5, 7), 0), ((3, 5, 7), 1), ((7,), 0), ((2, 3, 4, 5), -2)]:
        _check_log_softmax((randn(*shape) * 4).to(dtype), axis)
    _check_log_softmax((randn(9, 5000) * 4).to(dtype), 1)
    _check_log_softmax((randn(5000, 9) * 4).to(dtype), 0)


@pytest.mark.parametrize("order", ((0, 1, 2), (1, 0, 2), (2, 0, 1)), ids=str)
@pytest.mark.parametrize("size", ((6, 3, 5), (50, 4, 400)), ids=str)
@pytest.mark.parametrize("dtype", LOW)
def test_ctc(dtype: torch.dtype, size, order):
    frames, batch, labels = size
    leaf = (randn(*size) * 4).to(dtype).permute(order).contiguous().requires_grad_()
    logits = leaf.permute([order.index(i) for i in range(3)])
    lens, target_lens, blank = [frames, frames - 1, 1, 2][:batch], [2, 3, 1, 0][:batch], labels - 1
    targets = random_labels(blank, batch, 3)
    log_probs = loss.ctc_log_probs(logits)
    assert log_probs.dtype == torch.float32 and log_probs.is_contiguous()
    args = targets, torch.tensor(lens), torch.tensor(target_lens)
    out = F.ctc_loss(log_probs, *args, blank=blank, reduction="none")
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    exact = as_leaf(logits, torch.float64)
    normalized = references.log_softmax(exact, 2)
    ref = torch.stack(
        [
            references.ctc(normalized[:n, b], targets[b, :s].tolist(), blank)
            for b, (n, s) in enumerate(zip(lens, target_lens))
        ]
    )
    assert grad.dtype == dtype and (order[2] != 2 or grad.stride() == leaf.stride())
    assert_close(out, ref.detach(), 1.05)
    (ref_grad,) = torch.autograd.grad(ref.sum(), exact)
    assert_close(grad.permute([order.index(i) for i in range(3)]), ref_grad, INPUT_GRAD)


def test_small_case_of_ctc():
    """Of CASES.md: -log(10/81). F.ctc_loss itself does not take low precision."""
    for dtype in LOW:
        log_probs = loss.ctc_log_probs(torch.zeros(4, 1, 3, dtype=dtype))
        value = F.ctc_loss(
            log_probs, torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1]), blank=2, reduction="sum"
        )
        assert math.isclose(float(value), 2.0918640616783932, rel_tol=FLOAT32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda(kind: str, dtype: torch.dtype):
    logits = (randn(40, 3, 1000) * 4).to(dtype)
    for axis in (0, 1, 2):
        x, exact = logits.cuda().requires_grad_(), as_leaf(logits, torch.float64)
        target = make_target(kind, logits.shape, axis, dtype)
        for autocast in (False, True):
            with torch.autocast("cuda", dtype=dtype, enabled=autocast):
                out = loss.cross_entropy(x, target.cuda(), axis=axis)
                (grad,) = torch.autograd.grad(out.sum(), x)
            ref = references.cross_entropy(exact, _double(target), axis)
            assert out.dtype == torch.float32 and grad.dtype == dtype
            assert_close(out.cpu(), ref.detach(), 1.05)
            assert_close(grad.cpu(), torch.autograd.grad(ref.sum(), exact)[0], INPUT_GRAD)
    _, batch, time = 40, 3, 1000
    assert loss.ctc_log_probs(logits.cuda()).shape == (40, batch, time)
