"""
Cross entropy, log_softmax and CTC on raw tensors, against float64.
"""

from __future__ import annotations
from typing import Optional
import math
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
import references_loss as references
import tolerances
from tolerances import FLOAT32, INPUT_GRAD, assert_close, assert_within_one_rounding, relative_error, tolerance
from returnn_upcast.ops import fuse, loss, loss_rows

LOW = (torch.bfloat16, torch.float16)
KINDS = ("sparse", "dense")


def _randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _labels(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(2))


def _leaf(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.detach().to(dtype).requires_grad_()


def _target(kind: str, shape, axis: int, dtype: torch.dtype) -> torch.Tensor:
    if kind == "dense":
        return (_randn(*shape, seed=3) * 2).softmax(axis).to(dtype)
    shape = list(shape)
    return _labels(shape.pop(axis), *shape)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double() if x.is_floating_point() else x


def _strides(x: torch.Tensor):
    return [stride for size, stride in zip(x.shape, x.stride()) if size != 1]


def _check_against(func, reference, logits: torch.Tensor, target: torch.Tensor, axis: int, naive=None):
    """Values and gradients of func(logits, target, axis) within their tolerances; those of naive not."""
    logits, exact = _leaf(logits, logits.dtype), _leaf(logits, torch.float64)
    target_exact = _double(target)
    inputs, exact_inputs = [logits], [exact]
    if target.is_floating_point():
        target, target_exact = _leaf(target, target.dtype), target_exact.requires_grad_()
        inputs, exact_inputs = [logits, target], [exact, target_exact]
    out, ref = func(logits, target, axis=axis), reference(exact, target_exact, axis)
    upstream = _randn(*ref.shape, seed=4).abs() + 0.1
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
    logits = (_randn(40, vocab) * 4).to(dtype)
    target = _target(kind, logits.shape, 1, dtype)
    _check_against(loss.cross_entropy, references.cross_entropy, logits, target, 1, _naive)


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_of_256_000(kind: str):
    logits = (_randn(3, 256_000) * 4).bfloat16()
    target = _target(kind, logits.shape, -1, torch.bfloat16)
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
    logits = (_randn(*shape) * 4).bfloat16().permute(order).contiguous()
    logits = logits.permute([order.index(i) for i in range(len(order))])
    target = _target(kind, shape, axis, torch.bfloat16)
    for func, reference in [
        (loss.cross_entropy, references.cross_entropy),
        (loss.nll_from_log_probs, references.nll),
    ]:
        _check_against(func, reference, logits, target, axis)


def test_slices_and_expanded_logits():
    logits, target = (_randn(5, 3, 13) * 4).bfloat16()[:, 1:, :11], _labels(11, 5, 2)
    assert_close(loss.cross_entropy(logits, target, axis=-1), references.cross_entropy(logits.double(), target, -1), 1)
    expanded = logits[:1].expand(5, 2, 11)
    ref = references.cross_entropy(expanded.double(), target, -1)
    assert_close(loss.cross_entropy(expanded, target, axis=-1), ref, 1.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW)
def test_mean_of_1000(dtype: torch.dtype, kind: str):
    logits = (_randn(20, 300) * 8 + 1000).to(dtype)
    target = _target(kind, logits.shape, 1, dtype)
    _check_against(loss.cross_entropy, references.cross_entropy, logits, target, 1, _naive)
    _check_log_softmax(logits, 1)


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


def test_small_cases():
    """Of CASES.md: logits (10, 7.25, 0, -3)"""
    right = torch.tensor([-0.0620123845137143, -2.8120123845137143, -10.0620123845137143, -13.0620123845137143])
    for dtype in LOW:
        logits = torch.tensor([10, 7.25, 0, -3], dtype=dtype)
        value = loss.cross_entropy(logits, torch.tensor(0), axis=0)
        assert value.shape == () and abs(float(value) - 0.06201238451371431) < 1e-8
        assert torch.allclose(loss.log_softmax(logits, axis=0), right, rtol=FLOAT32, atol=0)


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
    exact = _leaf(logits, torch.float64)
    target = torch.tensor([target, (0.0, 1.0, 0.0) if isinstance(target, tuple) else 1])
    out = loss.cross_entropy(logits, target, axis=1)
    ref = F.cross_entropy(exact, target if target.ndim == 1 else target.double(), reduction="none")
    (grad,), (ref_grad,) = torch.autograd.grad(out.sum(), logits), torch.autograd.grad(ref.sum(), exact)
    assert torch.allclose(out.double(), ref, rtol=3e-7, atol=0, equal_nan=True)
    assert torch.allclose(grad.double(), ref_grad, rtol=1e-3, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("vocab", (7, 20_000))
def test_ignored_rows(vocab: int):
    logits, target = (_randn(6, vocab) * 4).bfloat16().requires_grad_(), _labels(vocab, 6)
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
    logits = _leaf(_randn(4, 1), torch.bfloat16)
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
    logits = _leaf(_randn(3, 9) * 4, dtype)
    target = _target(kind, (3, 9), 1, dtype)
    out, stock = loss.cross_entropy(logits, target, axis=1), F.cross_entropy(logits, target, reduction="none")
    assert torch.equal(out, stock) and out.dtype == dtype
    assert torch.equal(*(torch.autograd.grad(v.sum(), logits)[0] for v in (out, stock)))
    assert torch.equal(loss.log_softmax(logits, axis=1), logits.log_softmax(1))
    assert loss.nll_from_log_probs(logits.log_softmax(1), target, axis=1).dtype == dtype


def test_mixed_dtypes():
    logits = _randn(3, 9).bfloat16()
    for target_dtype in (torch.float16, torch.float32, torch.float64):
        target = _target("dense", (3, 9), 1, target_dtype).requires_grad_()
        for func in (loss.cross_entropy, loss.nll_from_log_probs):
            out = func(logits, target, axis=1)
            assert out.dtype == torch.promote_types(target_dtype, torch.float32)
            assert torch.autograd.grad(out.sum(), target)[0].dtype == target_dtype
    out = loss.cross_entropy(logits, torch.zeros(3, dtype=torch.int32), axis=1)
    assert torch.equal(out, loss.cross_entropy(logits, torch.zeros(3, dtype=torch.int64), axis=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (*LOW, torch.float32))
def test_nll_from_log_probs(dtype: torch.dtype, kind: str):
    log_probs = _randn(20, 400).log_softmax(1).to(dtype)
    _check_against(loss.nll_from_log_probs, references.nll, log_probs, _target(kind, (20, 400), 1, dtype), 1)


def _check_log_softmax(x: torch.Tensor, axis: int):
    x, exact = _leaf(x, x.dtype), _leaf(x, torch.float64)
    out, ref = loss.log_softmax(x, axis=axis), references.log_softmax(exact, axis)
    upstream = _randn(*x.shape, seed=5).float()
    (grad,), (ref_grad,) = torch.autograd.grad(out, x, upstream), torch.autograd.grad(ref, exact, upstream.double())
    assert out.dtype == torch.float32 and grad.dtype == x.dtype
    assert_close(out, ref.detach(), tolerances.OUTPUT)
    assert_close(grad, ref_grad, INPUT_GRAD)
    limit = tolerance(ref.detach(), torch.float32, tolerances.OUTPUT)
    assert relative_error(torch.log_softmax(x, axis), ref.detach()) > 100 * limit


@pytest.mark.parametrize("dtype", LOW)
def test_log_softmax(dtype: torch.dtype):
    for shape, axis in [((3, 5, 7), -1), ((3, 5, 7), 0), ((3, 5, 7), 1), ((7,), 0), ((2, 3, 4, 5), -2)]:
        _check_log_softmax((_randn(*shape) * 4).to(dtype), axis)
    _check_log_softmax((_randn(9, 5000) * 4).to(dtype), 1)
    _check_log_softmax((_randn(5000, 9) * 4).to(dtype), 0)


@pytest.mark.parametrize("order", ((0, 1, 2), (1, 0, 2), (2, 0, 1)), ids=str)
@pytest.mark.parametrize("size", ((6, 3, 5), (50, 4, 400)), ids=str)
@pytest.mark.parametrize("dtype", LOW)
def test_ctc(dtype: torch.dtype, size, order):
    frames, batch, labels = size
    leaf = (_randn(*size) * 4).to(dtype).permute(order).contiguous().requires_grad_()
    logits = leaf.permute([order.index(i) for i in range(3)])
    lens, target_lens, blank = [frames, frames - 1, 1, 2][:batch], [2, 3, 1, 0][:batch], labels - 1
    targets = _labels(blank, batch, 3)
    log_probs = loss.ctc_log_probs(logits)
    assert log_probs.dtype == torch.float32 and log_probs.is_contiguous()
    args = targets, torch.tensor(lens), torch.tensor(target_lens)
    out = F.ctc_loss(log_probs, *args, blank=blank, reduction="none")
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    exact = _leaf(logits, torch.float64)
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


def _saved_bytes(func, *own: torch.Tensor) -> int:
    known = {x.untyped_storage().data_ptr() for x in own}
    saved = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = func()
    del out
    return sum(saved.values())


@pytest.mark.parametrize("compile_", ("1", "0"))
def test_what_is_kept_for_backward(compile_: str, monkeypatch):
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", compile_)
    x, labels = _leaf(_randn(4, 50, 300), torch.bfloat16), _labels(300, 4, 50)
    dense = _target("dense", x.shape, 2, torch.bfloat16)
    per_row = 200 * 4
    assert _saved_bytes(lambda: loss.cross_entropy(x, labels, axis=2), x, labels) <= 2 * per_row
    assert _saved_bytes(lambda: loss.cross_entropy(x, dense, axis=2), x, dense) <= 3 * per_row
    assert _saved_bytes(lambda: loss.nll_from_log_probs(x, dense, axis=2), x, dense) <= per_row
    assert _saved_bytes(lambda: loss.log_softmax(x, axis=2), x) == x.numel() * 4
    out = loss.ctc_log_probs(x)
    assert (
        _saved_bytes(lambda: F.ctc_loss(loss.ctc_log_probs(x), labels[:2, :50].T, [4] * 50, [2] * 50), x)
        < 4.2 * x.numel()
    )
    assert out.grad_fn.saved_tensors[0].data_ptr() == out.data_ptr()


LABELS, DENSE = _labels(5, 4, 3), _target("dense", (4, 3, 5), 2, torch.bfloat16)
# of logits [4, 3, 5]
OPS = {
    "sparse": lambda x: loss.cross_entropy(x, LABELS, axis=2),
    "dense": lambda x: loss.cross_entropy(x, DENSE.to(x.dtype), axis=2),
    "nll sparse": lambda x: loss.nll_from_log_probs(x, LABELS, axis=2),
    "nll dense": lambda x: loss.nll_from_log_probs(x, DENSE.to(x.dtype), axis=2),
    "log_softmax": lambda x: loss.log_softmax(x, axis=2),
    "ctc": lambda x: loss.ctc_log_probs(x),
}
NONLINEAR = ("sparse", "dense", "log_softmax", "ctc")
X = (_randn(4, 3, 5) * 2).bfloat16()


@pytest.mark.parametrize("op", OPS)
def test_derivatives(op: str):
    x = X.double().requires_grad_()
    assert torch.autograd.gradcheck(OPS[op], (x,)) and torch.autograd.gradgradcheck(OPS[op], (x,))


@pytest.mark.parametrize("op", NONLINEAR)
def test_second_derivative_in_low_precision(op: str):
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x = _leaf(X, dtype)
        (grad,) = torch.autograd.grad(OPS[op](x).sin().sum(), x, create_graph=True)
        assert grad.requires_grad
        results.append((grad.detach(), *torch.autograd.grad((grad.double() * _randn(4, 3, 5, seed=7)).sum(), x)))
    for value, exact in zip(*results):
        assert value.dtype == torch.bfloat16
        assert relative_error(value, exact) <= 4 * tolerances.floor(exact, torch.bfloat16)  # rounded on the way, too


def test_second_derivative_of_a_dense_target():
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x, target = _leaf(X, dtype), _leaf(DENSE, dtype)
        out = loss.cross_entropy(x, target, axis=2).sin().sum()
        grads = torch.autograd.grad(out, (x, target), create_graph=True)
        penalty = sum((g.double() * _randn(4, 3, 5, seed=i)).sum() for i, g in enumerate(grads))
        results.append(torch.autograd.grad(penalty, (x, target)))
    for value, exact in zip(*results):
        assert relative_error(value, exact) <= 3 * tolerances.floor(exact, torch.bfloat16)


TRANSFORMS = {
    "vmap": lambda func, x: torch.func.vmap(func)(x[None])[0],
    "jvp": lambda func, x: torch.func.jvp(func, (x,), (x,))[0],
    "make_fx": lambda func, x: make_fx(func)(x)(x),
    "torch.compile": lambda func, x: torch.compile(func, fullgraph=True, backend="aot_eager")(x),
    "checkpoint": lambda func, x: torch.utils.checkpoint.checkpoint(func, x, use_reentrant=False),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_transforms(op: str, transform: str):
    assert_within_one_rounding(TRANSFORMS[transform](OPS[op], X), OPS[op](X))


@pytest.mark.parametrize("op", OPS)
def test_forward_mode(op: str):
    exact = torch.func.jvp(OPS[op], (X.double(),), (X.double(),))[1]
    assert_close(torch.func.jvp(OPS[op], (X,), (X,))[1], exact, 1.05, float32=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_functional_gradient(op: str):
    x = _leaf(X, torch.bfloat16)
    found = torch.func.grad(lambda x_: OPS[op](x_).sum())(X)
    assert found.dtype == torch.bfloat16
    assert_within_one_rounding(found, torch.autograd.grad(OPS[op](x).sum(), x)[0])


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str):
    plain, under = [_leaf(X, torch.bfloat16) for _ in range(2)]
    out = OPS[op](plain)
    out.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_under = OPS[op](under)
        out_under.sum().backward()
        assert torch.equal(OPS[op](X.float()), OPS[op](X.float()))
    assert torch.equal(out, out_under) and torch.equal(plain.grad, under.grad)


def _all_numbers(shape, axis: int, dtype=torch.bfloat16):
    """:return: results and gradients of all that runs kernels on rows"""
    x = _leaf(_randn(*shape) * 4, dtype)
    target = _target("dense", shape, axis, dtype).requires_grad_()
    results = []
    for op in (
        lambda: loss.cross_entropy(x, _target("sparse", shape, axis, dtype), axis=axis),
        lambda: loss.cross_entropy(x, target, axis=axis),
        lambda: loss.nll_from_log_probs(x, target, axis=axis),
        lambda: loss.log_softmax(x, axis=axis),
        lambda: loss.ctc_log_probs(x) if x.ndim == 3 else x.float(),
        lambda: loss.ctc_log_probs(x.transpose(0, 1)) if x.ndim == 3 else x.float(),
    ):
        out = op()
        grads = torch.autograd.grad(out, (x, target), torch.full_like(out, 0.3), allow_unused=True)
        results += [out.detach(), *(g for g in grads if g is not None)]
    return results


@pytest.mark.parametrize("shape, axis", [((40, 70), 1), ((40, 7, 30), 2), ((3, 31, 40), 1), ((31, 40), 0)], ids=str)
def test_blocks_of_rows(shape, axis: int, monkeypatch):
    """Without a compiler, rows are done in blocks, with the same numbers."""
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    whole = _all_numbers(shape, axis)
    monkeypatch.setattr(loss_rows, "_BLOCK_NUMEL", 500)
    for in_blocks, value in zip(_all_numbers(shape, axis), whole):
        assert_within_one_rounding(in_blocks, value)


class _Largest(TorchDispatchMode):
    """Number of elements of the largest float32 tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs: Optional[dict] = None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.numel = max(self.numel, x.numel())
        return out


def test_blocks_need_little_memory(monkeypatch):
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    monkeypatch.setattr(loss_rows, "_BLOCK_NUMEL", 1000)
    rows = _randn(100, 90).bfloat16()
    with _Largest() as largest:
        peak, log_sum = loss_rows.row_stats(rows)
        loss_rows.softmax_times(rows, peak, log_sum, torch.ones(100), torch.bfloat16)
    assert 0 < largest.numel <= 1000


@pytest.mark.parametrize("shape, axis", [((60, 700), 1), ((4, 700, 20), 1), ((30, 8, 200), 2)], ids=str)
def test_compiled_is_the_same(shape, axis: int, monkeypatch):
    compiled = _all_numbers(shape, axis)
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    for value, plain in zip(compiled, _all_numbers(shape, axis)):
        assert_within_one_rounding(value, plain)


def test_number_of_compilations_is_bounded(monkeypatch):
    """Over 60 lengths, with and without gradient."""
    monkeypatch.setattr(fuse, "_failed", lambda func, args, exc: pytest.fail(f"{func.__name__}: {exc}"))
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    for length in range(70, 130):
        x = _leaf(_randn(3, length, 200), torch.bfloat16)
        out = loss.cross_entropy(x if length % 5 else x.detach(), _labels(200, 3, length), axis=2)
        if length % 5:
            out.mean().backward()
    assert counters["stats"]["unique_graphs"] - before <= 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda(kind: str, dtype: torch.dtype):
    logits = (_randn(40, 3, 1000) * 4).to(dtype)
    for axis in (0, 1, 2):
        x, exact = logits.cuda().requires_grad_(), _leaf(logits, torch.float64)
        target = _target(kind, logits.shape, axis, dtype)
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
