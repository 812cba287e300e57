"""
Final projections in float32, and projection and cross entropy in one, on raw tensors, against float64.
"""

from __future__ import annotations
import functools
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
import references_loss as references
from tolerances import FLOAT32, INPUT_GRAD, PARAM_GRAD, PARAM_GRAD_FLOAT32, assert_close, assert_within_one_rounding
from tolerances import relative_error
from returnn_upcast.ops import linear_loss, loss, matmul
from returnn_upcast.ops.linear_loss import linear_cross_entropy, linear_f32

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)]  # of x and of the parameters


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _operands(*shape: int, labels: int, dtypes=(BF16, BF16), std: float = 3.0):
    """:return: x [*shape], weight, bias: leaves"""
    x, weight = _randn(*shape, seed=1) + 1, _randn(shape[-1], labels, seed=2) * std / shape[-1] ** 0.5
    operands = x.to(dtypes[0]), weight.to(dtypes[1]), _randn(labels, seed=3).to(dtypes[1])
    return tuple(v.requires_grad_() for v in operands)


def _target(labels: int, *shape: int) -> torch.Tensor:
    target = torch.randint(0, labels, shape, generator=torch.Generator().manual_seed(4))
    if target.numel() > 2:
        target.view(-1)[1] = -100
    return target


def _exact(operands):
    return [None if v is None else v.detach().double().requires_grad_() for v in operands]


def _gradients(out: torch.Tensor, operands, upstream: torch.Tensor):
    return torch.autograd.grad(out, [v for v in operands if v is not None], upstream.to(out.dtype))


def _check_gradients(operands, out, ref, exact):
    upstream = _randn(*ref.shape, seed=5).float()
    names = ("x", "weight", "bias")
    grads, ref_grads = _gradients(out, operands, upstream), _gradients(ref, exact, upstream)
    for name, value, grad, ref_grad in zip(names, (v for v in operands if v is not None), grads, ref_grads):
        assert grad.dtype == value.dtype, name
        factor = INPUT_GRAD if name == "x" else PARAM_GRAD
        assert_close(grad, ref_grad, factor, float32=PARAM_GRAD_FLOAT32, what=f"gradient of {name}")


@pytest.mark.parametrize("with_bias", (True, False))
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((3, 5, 16), (16,), (4, 200, 64), (0, 16)), ids=str)
def test_linear_f32(shape, dtypes, with_bias: bool):
    x, weight, bias = _operands(*shape, labels=300, dtypes=dtypes)
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
    x, weight, bias = _operands(6, 5, 16, labels=7)
    view = x.transpose(0, 1)[1:, ::2]
    assert_close(linear_f32(view, weight, bias), view.double() @ weight.double() + bias.double(), 1.02)
    for dtype in (F32, F64):
        x, weight, bias = _operands(5, 16, labels=7, dtypes=(dtype, dtype))
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
    operands, target = _operands(*shape, labels=labels, dtypes=dtypes), _target(labels, *shape[:-1])
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
    operands, target = _operands(300, 64, labels=1000), _target(1000, 300)
    exact = _exact(operands)
    x, weight, bias = operands
    out = F.cross_entropy((x @ weight + bias).float(), target, reduction="none")
    with pytest.raises(AssertionError, match="gradient of x"):
        _check_gradients(operands, out, _reference(operands, exact, target, 0.0, False), exact)


@pytest.mark.parametrize("sizes", [(400, 300, 5, 3), (1, 1, 10**6, 1)], ids=str)
@pytest.mark.parametrize("smoothing, float32_logits", [(0.0, False), (0.1, True)])
def test_blocks(smoothing: float, float32_logits: bool, sizes, monkeypatch):
    """Blocks of rows and of labels, none of equal size: the same numbers, and no logits beyond a block."""
    operands, target = _operands(17, 3, 16, labels=130), _target(130, 17, 3)
    func = functools.partial(linear_cross_entropy, label_smoothing=smoothing, float32_logits=float32_logits)
    upstream = _randn(17, 3, seed=6)
    whole = func(*operands, target)
    whole_grads = _gradients(whole, operands, upstream)
    for name, value in zip(("_FORWARD_NUMEL", "_BACKWARD_NUMEL", "_MAX_ROWS", "_MIN_ROWS"), sizes):
        monkeypatch.setattr(linear_loss, name, value)
    monkeypatch.setattr(linear_loss, "_MIN_LABELS", 1)
    sizes_seen = []
    logits_of = linear_loss._logits
    monkeypatch.setattr(linear_loss, "_logits", lambda *args: sizes_seen.append((v := logits_of(*args)).numel()) or v)
    out = func(*operands, target)
    grads = _gradients(out, operands, upstream)
    assert len(sizes_seen) > 20 and max(sizes_seen) <= max(400, 130)
    for value, block in zip((whole, *whole_grads), (out, *grads)):
        assert_within_one_rounding(value, block)


def test_many_rows():
    """More than one block of rows in backward: the gradients of the parameters are accumulated in float32."""
    rows = linear_loss._MAX_ROWS + 5
    operands, target = _operands(rows, 4, labels=6), _target(6, rows)
    exact = _exact(operands)
    out = linear_cross_entropy(*operands, target)
    _check_gradients(operands, out, _reference(operands, exact, target, 0.0, False), exact)


def test_forbidden_labels_and_confident_rows():
    x, weight, bias = _operands(9, 16, labels=12)
    target = torch.arange(9)
    with torch.no_grad():
        bias[10] = -torch.inf
    for float32_logits in (False, True):
        out = linear_cross_entropy(x, weight, bias, target, float32_logits=float32_logits)
        grads = _gradients(out, (x, weight, bias), torch.ones(9))
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
    x, weight, bias = _operands(0, 16, labels=5)
    target = torch.zeros(0, dtype=torch.int64)
    out = linear_cross_entropy(x, weight, bias, target) if func == "cross_entropy" else linear_f32(x, weight, bias)
    grads = _gradients(out, (x, weight, bias), torch.zeros(out.shape))
    assert out.shape[0] == 0 and all((g == 0).all() for g in grads)


def test_errors():
    x, weight, bias = _operands(3, 16, labels=5)
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
    x, weight, bias = _operands(7, 16, labels=40)
    target = _target(40, 7)
    for func in (linear_f32, lambda *args: linear_cross_entropy(*args, target)):
        for wanted in (x, weight, bias):
            operands = [v if v is wanted else v.detach() for v in (x, weight, bias)]
            out = func(*operands)
            (grad,) = torch.autograd.grad(out.sum(), wanted)
            assert torch.equal(grad, torch.autograd.grad(func(x, weight, bias).sum(), wanted)[0])
        assert func(x, weight, None).shape == func(x, weight, bias).shape


def test_what_is_kept_for_backward():
    x, weight, bias = _operands(50, 16, labels=400)
    own, saved = {v.data_ptr() for v in (x, weight, bias)}, []
    pack = lambda v: saved.append(v) or v
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        linear_cross_entropy(x, weight, bias, _target(400, 50))
    assert sum(v.nbytes for v in saved if v.data_ptr() not in own) <= 50 * (3 * 4 + 8)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        linear_f32(x, weight, bias)
    assert all(v.data_ptr() in own for v in saved)


TARGET = _target(6, 4)
FUNCS = {
    "linear_f32": linear_f32,
    "cross entropy": functools.partial(linear_cross_entropy, target=TARGET),
    "smoothed": functools.partial(linear_cross_entropy, target=TARGET, label_smoothing=0.1),
    "float32 logits": functools.partial(linear_cross_entropy, target=TARGET, float32_logits=True),
}


@pytest.mark.parametrize("func", FUNCS)
def test_derivatives(func: str):
    operands = _operands(4, 5, labels=6, dtypes=(F64, F64))
    assert torch.autograd.gradcheck(FUNCS[func], operands) and torch.autograd.gradgradcheck(FUNCS[func], operands)


@pytest.mark.parametrize("func", FUNCS)
def test_second_derivative_in_low_precision(func: str):
    results = []
    for fused in (True, False):
        operands = _operands(4, 5, labels=6)
        call = FUNCS[func] if fused else _plain(func)
        grads = torch.autograd.grad(call(*operands).sin().sum(), operands, create_graph=True)
        penalty = sum((g.double() * _randn(*g.shape, seed=i)).sum() for i, g in enumerate(grads))
        results.append([*(g.detach() for g in grads), *torch.autograd.grad(penalty, operands)])
    for value, plain in zip(*results):
        assert value.dtype == BF16
        assert relative_error(value, plain.double()) <= 4 * 2**-9  # rounded a few times on the way, each by half a step


def _plain(func: str):
    """:return: the function as torch.func sees it: plain code"""
    return lambda *operands: torch.func.vmap(lambda x: FUNCS[func](x, *operands[1:]))(operands[0][None])[0]


def _compile(func, operands):
    torch._dynamo.reset()  # torch 2.6 takes partials of one function for one another
    return torch.compile(func, fullgraph=True, backend="aot_eager")(*operands)


TRANSFORMS = {
    "vmap": lambda func, operands: torch.func.vmap(lambda x: func(x, *operands[1:]))(operands[0][None])[0],
    "make_fx": lambda func, operands: make_fx(func)(*operands)(*operands),
    "torch.compile": _compile,
    "jvp": lambda func, operands: torch.func.jvp(func, operands, operands)[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("func", FUNCS)
def test_transforms(func: str, transform: str):
    operands = tuple(v.detach() for v in _operands(4, 5, labels=6))
    assert_within_one_rounding(TRANSFORMS[transform](FUNCS[func], operands), FUNCS[func](*operands))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("func", FUNCS)
def test_functional_gradient(func: str, dtypes):
    operands = _operands(4, 5, labels=6, dtypes=dtypes)
    plain = tuple(v.detach() for v in operands)
    found = torch.func.grad(lambda *args: FUNCS[func](*args).sum(), argnums=(0, 1, 2))(*plain)
    for value, expected in zip(found, _gradients(FUNCS[func](*operands).sum(), operands, torch.ones(()))):
        assert_within_one_rounding(value, expected)


@pytest.mark.parametrize("func", FUNCS)
def test_autocast_changes_nothing(func: str):
    results = []
    for autocast in (False, True):
        operands = _operands(4, 5, labels=6, dtypes=(BF16, F32))
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            out = FUNCS[func](*operands)
            results.append([out.detach(), *torch.autograd.grad(out.sum(), operands)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("func", FUNCS)
def test_without_a_compiler(func: str, monkeypatch):
    results = []
    for compile_ in ("1", "0"):
        monkeypatch.setenv("RETURNN_UPCAST_COMPILE", compile_)
        operands = _operands(50, 8, labels=1000)
        call = FUNCS[func]
        if func != "linear_f32":
            call = functools.partial(call.func, **{**call.keywords, "target": _target(1000, 50)})
        out = call(*operands)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), operands)])
    for a, b in zip(*results):
        assert_within_one_rounding(a, b)


@pytest.mark.parametrize("onednn", (True, False))
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, BF16), (F16, F32), (F32, F32), (F64, BF16)], ids=str)
def test_matmul_wide(dtypes, onednn: bool, monkeypatch):
    if onednn and not matmul._ONEDNN:
        pytest.skip("this torch has no oneDNN, or its private op is gone")
    monkeypatch.setattr(matmul, "_ONEDNN", onednn)
    monkeypatch.setattr(matmul, "_MIN_ONEDNN_PRODUCTS", 1)
    a, b = _randn(30, 50, seed=1).to(dtypes[0]), _randn(50, 70, seed=2).to(dtypes[1])
    for left, right in [(a, b), (a.T.contiguous().T, b), (a[:, 3:], b[3:]), (a[::2], b[:, 4:60]), (a[:1], b[:, :1])]:
        out = matmul.matmul_wide(left, right)
        assert out.dtype == (F64 if F64 in dtypes else F32)
        assert_close(out, left.double() @ right.double(), 1.02)
    assert matmul.matmul_wide(a[:0], b).shape == (0, 70)
    assert (matmul.matmul_wide(a[:, :0], b[:0]) == 0).all()


@pytest.mark.parametrize("scale", (1e-9, 1.0, 1e6))
@pytest.mark.parametrize("low", (BF16, F16))
def test_split_product(low: torch.dtype, scale: float):
    """What CUDA runs, with a product of this device in place of that one's: float32 times low precision, to 16 bits."""
    wide, narrow = (_randn(30, 50, seed=1) * scale).float(), _randn(50, 20, seed=2).to(low)

    def mm(a, b):
        assert a.dtype == b.dtype == low and torch.isfinite(a).all()
        return a.float() @ b.float()

    ref = wide.double() @ narrow.double()
    assert relative_error(matmul.split_matmul(wide, narrow, mm), ref) <= PARAM_GRAD_FLOAT32
    assert relative_error(matmul.split_matmul(narrow.T, wide.T, mm), ref.T) <= PARAM_GRAD_FLOAT32
    other = narrow.to(F16 if low == BF16 else BF16)
    assert_close(matmul.split_matmul(other.T, narrow, mm), other.double().T @ narrow.double(), 1, float32=1e-5)
    assert (matmul.split_matmul(wide * 0, narrow, mm) == 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("float32_logits", (False, True))
def test_cuda(dtypes, float32_logits: bool):
    operands, target = _operands(200, 64, labels=3000, dtypes=dtypes), _target(3000, 200)
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
    upstream = _randn(200, seed=5).float()
    for grad, ref_grad in zip(_gradients(out, on_gpu, upstream.cuda()), _gradients(ref, exact, upstream)):
        assert_close(grad.cpu(), ref_grad, PARAM_GRAD, float32=PARAM_GRAD_FLOAT32)


def test_agrees_with_the_single_ops():
    x, weight, bias = _operands(7, 16, labels=40)
    target = _target(40, 7)
    logits = x @ weight + bias
    assert torch.allclose(linear_cross_entropy(x, weight, bias, target), loss.cross_entropy(logits, target, axis=1))
    separate = loss.cross_entropy(linear_f32(x, weight, bias), target, axis=1)
    assert torch.allclose(linear_cross_entropy(x, weight, bias, target, float32_logits=True), separate)
