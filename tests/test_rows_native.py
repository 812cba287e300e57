"""
The C++ code of norms and log_softmax: all layouts and sizes against float64, and what happens where it can't be compiled.
"""

from __future__ import annotations
from typing import NamedTuple, Optional, Tuple
import math
import shutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from returnn_upcast.ops import fuse, loss, norm, rows_native as native
import references
import references_loss
import tolerances
from tolerances import assert_close

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

LOW = (torch.bfloat16, torch.float16)
COLUMNS = (1, 2, 15, 16, 31, 32, 33, 64, 100, 513, 2049, 5000)
LAYOUTS = ("contiguous", "transposed", "padded rows", "expanded", "every second", "windows")
EPS = 1e-5
MIN_NUMEL = native.MIN_NUMEL


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(native, "MIN_NUMEL", 1)
    monkeypatch.setattr(fuse, "MIN_COMPILE_NUMEL", math.inf)


class Case(NamedTuple):
    """What one random norm is made of"""

    seed: int
    dtype: torch.dtype
    wide: bool  # result in float32
    lead: Tuple[int, ...]
    columns: int
    layout: str
    grad_layout: str
    center: bool
    offset: float
    scale: Optional[torch.dtype]
    bias: Optional[torch.dtype]
    param_layout: str


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(LOW),
    wide=st.booleans(),
    lead=st.sampled_from([(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3), (150,), (1, 1), (3, 100)]),
    columns=st.sampled_from(COLUMNS),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
    center=st.booleans(),
    offset=st.sampled_from([0.0, 1.0, 30.0]),
    scale=st.sampled_from([None, torch.float32, torch.bfloat16]),
    bias=st.sampled_from([None, torch.float32, torch.bfloat16]),
    param_layout=st.sampled_from(["contiguous", "every second"]),
)


def _lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """:return: the same shape, with numbers of x"""
    if layout == "transposed" and x.ndim > 2:  # contiguous if one of the axes is 1, with any stride there
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "padded rows":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "every second":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "windows" and x.ndim == 2:
        return torch.cat([x[:, 0], x[0]]).as_strided(x.shape, (1, 1))
    return x[:1].expand(x.shape) if layout == "expanded" and x.ndim > 1 else x


def _leaves(case: Case):
    """:return: x, scale, bias, gradient of the result"""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (*case.lead, case.columns)
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    params = (torch.randn((1,) * len(case.lead) + (case.columns,), generator=generator) for _ in range(2))
    dtypes = case.scale, case.bias
    scale, bias = (d if d is None else _lay_out(p.to(d), case.param_layout) for p, d in zip(params, dtypes))
    grad = _lay_out(grad.to(torch.float32 if case.wide else case.dtype), case.grad_layout)
    return _lay_out((x + case.offset).to(case.dtype), case.layout), scale, bias, grad


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=cases)
def test_all_layouts_of_norms(case: Case):
    *inputs, grad = _leaves(case)
    leaves = [None if x is None else x.detach().requires_grad_(True) for x in inputs]
    wide = [None if x is None else x.detach().double().requires_grad_(True) for x in inputs]
    args = dict(axes=(len(case.lead),), eps=EPS, center=case.center)
    out, mean, var = norm.normalize(leaves[0], scale=leaves[1], bias=leaves[2], out_dtype=grad.dtype, **args)
    params = {name: p for name, p in zip(("scale", "bias"), wide[1:]) if p is not None}
    expected = (references.layer_norm if case.center else references.rms_norm)(wide[0], params, eps=EPS)
    out.backward(grad)
    expected.backward(grad.double())
    elements = wide[0].detach()
    expected_mean = elements.mean(-1, keepdim=True)
    expected_var = ((elements - expected_mean if case.center else elements) ** 2).mean(-1, keepdim=True)
    assert_close(var, expected_var, 1.0, float32=1e-6)
    assert mean is None or float((mean - expected_mean).abs().max()) <= 1e-6 * (1 + case.offset)
    # float32 statistics: of a mean that is large against the deviation, one digit less
    noise, steepest = 1e-6 * (1 + case.offset), float((expected_var + EPS).rsqrt().max())
    assert out.dtype == grad.dtype and (out.is_contiguous() or not inputs[0].is_contiguous())
    for value, exact in [(out, expected.detach()), *((a.grad, b.grad) for a, b in zip(leaves, wide) if a is not None)]:
        floor = tolerances.floor(exact, value.dtype) * float(exact.norm())
        # where a gradient cancels, the rest is as large as float32 leaves it
        rest = noise * (float(exact.norm()) + float(grad.double().norm()) * steepest)
        assert float((value.detach().double() - exact).norm()) <= 1.05 * floor + rest


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases, ctc=st.booleans())
def test_all_layouts_of_log_softmax(case: Case, ctc: bool):
    x, _, _, grad = _leaves(case._replace(wide=True))
    x, wide = x.detach().requires_grad_(True), x.detach().double().requires_grad_(True)
    out = loss.ctc_log_probs(x) if ctc and x.ndim == 3 else loss.log_softmax(x, axis=-1)
    expected = references_loss.log_softmax(wide, -1)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == torch.float32 and out.is_contiguous()
    assert_close(out, expected.detach(), 1.0)
    floor = tolerances.floor(wide.grad, x.dtype) * float(wide.grad.norm())
    assert float((x.grad.double() - wide.grad).norm()) <= 1.05 * floor + 1e-6 * float(grad.double().norm())


def _ran(monkeypatch, run) -> bool:
    """:return: whether run calls the native code"""
    calls, call = [], native._call
    with monkeypatch.context() as patch:
        patch.setattr(native, "_call", lambda *args, **kwargs: calls.append(args) or call(*args, **kwargs))
        run()
    return bool(calls)


X = torch.randn(4, 6, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
SCALE = torch.ones(1, 1, 40)


def _normalize(x: torch.Tensor, **kwargs) -> torch.Tensor:
    return norm.normalize(x, **{"axes": (x.ndim - 1,), "eps": EPS, **kwargs})[0]


OTHERS = {
    "float32": lambda: _normalize(X.float()),
    "mask": lambda: _normalize(X, mask=torch.ones(1, 1, 40, dtype=torch.bool)),
    "axis that is not the last": lambda: _normalize(X, axes=(1,)),
    "two axes": lambda: _normalize(X, axes=(1, 2)),
    "features not next to each other": lambda: _normalize(X.mT.contiguous().mT),
    "scale per frame": lambda: _normalize(X, scale=torch.ones(1, 6, 40)),
    "one scale for all": lambda: _normalize(X, scale=torch.ones(1, 1, 1)),
    "scale in float64": lambda: _normalize(X, scale=SCALE.double()),
    "negative view": lambda: _normalize(torch._neg_view(X)),
    "zeros without memory": lambda: _normalize(torch._efficientzerotensor(X.shape, dtype=X.dtype)),
    "negative view of the scale": lambda: _normalize(X, scale=torch._neg_view(SCALE)),
    "result in float64": lambda: _normalize(X, out_dtype=torch.float64),
    "result in the other low dtype": lambda: _normalize(X, out_dtype=torch.float16),
    "many axes, with gaps": lambda: _normalize(torch.cat([X[None], X[None]], -1)[..., :40]),
    "nothing": lambda: _normalize(X[:0]),
    "rows of nothing": lambda: _normalize(X[..., :0]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_inputs_for_other_paths(kind, monkeypatch):
    """what the C++ code would read wrongly by pointer"""
    assert _ran(monkeypatch, lambda: _normalize(X, scale=SCALE))
    assert not _ran(monkeypatch, OTHERS[kind])


@pytest.mark.parametrize("grad", ["negative view", "zeros without memory", "expanded"])
def test_any_gradient(grad):
    grads = {
        "negative view": torch._neg_view(X),
        "zeros without memory": torch._efficientzerotensor(X.shape, dtype=X.dtype),
        "expanded": X[:1, :1, :1].expand(X.shape),
    }
    leaf, wide = X.clone().requires_grad_(True), X.double().requires_grad_(True)
    _normalize(leaf).backward(grads[grad])
    references.layer_norm(wide, {}, eps=EPS).backward(grads[grad].double().resolve_neg() + 0.0)
    assert float((leaf.grad.double() - wide.grad).norm()) <= 0.01 * float(wide.grad.norm()) + 1e-5


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32, torch.float16])
def test_gradient_of_a_result_in_another_dtype(out_dtype):
    leaf, wide = X.clone().requires_grad_(True), X.double().requires_grad_(True)
    grad = torch.randn(X.shape, generator=torch.Generator().manual_seed(1)).to(out_dtype)
    _normalize(leaf, out_dtype=out_dtype).backward(grad)
    references.layer_norm(wide, {}, eps=EPS).backward(grad.double())
    assert_close(leaf.grad, wide.grad, tolerances.INPUT_GRAD)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ctc", [False, True])
def test_log_softmax_of_special_values(value, ctc):
    """as in torch's float32: a row with NaN or inf is NaN, -inf is a label that is not possible"""
    x = X.clone()
    x[0, 1, 3] = value
    x[2, 2] = value
    leaf, wide = x.clone().requires_grad_(True), x.float().requires_grad_(True)
    out = loss.ctc_log_probs(leaf) if ctc else loss.log_softmax(leaf, axis=-1)
    expected = wide.log_softmax(-1)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    if ctc:  # as the CTC kernel has it
        grad[0, 1, 3] = grad[2, 2] = math.nan if value == -math.inf else 0.0
    out.backward(grad)
    expected.backward(grad.nan_to_num() if ctc else grad)
    rows = torch.ones(4, 6, dtype=torch.bool)
    rows[2, 2] = False
    assert torch.allclose(leaf.grad[rows].float(), wide.grad[rows], rtol=0.01, atol=1e-4, equal_nan=True)
    assert leaf.grad[2, 2].isnan().all()


def test_exponential():
    """the softmax of two logits, from 0 to where it is 0"""
    distance = torch.linspace(0, 130, 20_001).to(torch.bfloat16).unique()
    x = torch.stack([torch.zeros_like(distance), -distance], -1)
    out, exact = loss.log_softmax(x, axis=-1)[:, 0], -distance.double().neg().exp().log1p()
    error = (out - exact).abs()
    assert (error <= 3e-7 * exact.abs() + 1e-37).all() and error.max() > 0


def test_rows_of_millions():
    """float32 sums over so many lose digits"""
    x = torch.randn(1, 2**22, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out, exact = loss.log_softmax(x, axis=-1), x.double().log_softmax(-1)
    assert float((out - exact).abs().max()) <= 1.5e-6  # half a spacing of floats there, for each of two differences
    _, mean, var = norm.normalize(x + 8, axes=(1,), eps=EPS)
    exact = (x + 8).double()
    assert abs(float(mean / exact.mean()) - 1) <= 1e-7 and abs(float(var / exact.var(unbiased=False)) - 1) <= 1e-6


def test_backward_of_what_another_path_has_begun(monkeypatch):
    """as where rf_upcast_compile is set in between: the statistics have the memory layout of the input there"""
    leaf, wide = X.transpose(0, 1).requires_grad_(True), X.double().transpose(0, 1).requires_grad_(True)
    with monkeypatch.context() as patch:
        patch.setattr(native, "MIN_NUMEL", math.inf)
        out = _normalize(leaf, scale=SCALE)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out.backward(grad)
    references.layer_norm(wide, {}, eps=EPS).backward(grad.double())
    assert_close(leaf.grad, wide.grad, tolerances.INPUT_GRAD)


def test_one_row_does_not_depend_on_the_others():
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for func in (_normalize, lambda x_: loss.log_softmax(x_, axis=-1)):
        whole = func(x)
        assert torch.equal(func(x[17:18]), whole[17:18]) and torch.equal(func(x[100:]), whole[100:])


def test_gradients_of_parameters_of_many_rows():
    """float32 sums over more rows than a float32 can count in steps of one"""
    x = torch.ones(2**17, 2, dtype=torch.bfloat16)
    x[:, 1] = -1
    scale, bias = (torch.ones(1, 2).requires_grad_(True) for _ in range(2))
    _normalize(x, scale=scale, bias=bias).backward(torch.full_like(x, 257 / 256))
    expected = float(torch.full((), 257 / 256).to(torch.bfloat16)) * 2**17
    assert torch.allclose(bias.grad, torch.full((1, 2), expected), rtol=1e-7)
    assert torch.allclose(scale.grad[:, 0], torch.tensor([expected / math.sqrt(1 + EPS)]), rtol=1e-6)


def test_torch_where_it_cannot_be_compiled(lose_native):
    """the same numbers"""
    expected = _normalize(X)
    logged = lose_native()
    for _ in range(2):
        out = _normalize(X)
    tolerances.assert_within_one_rounding(out, expected)
    assert all("no native rows" in m for m in logged() if "no native" in m)


@pytest.mark.parametrize("func", [_normalize, lambda x: loss.log_softmax(x, axis=-1)], ids=["norm", "log_softmax"])
def test_nobody_waits_for_a_compiler_for_small_inputs(func, forget_native, monkeypatch):
    forget_native()
    monkeypatch.setattr(native, "MIN_NUMEL", MIN_NUMEL)
    monkeypatch.setattr(native.function, "_load", lambda: pytest.fail("compiled"))
    func(torch.ones(1, MIN_NUMEL - 1, dtype=torch.bfloat16))
    with pytest.raises(pytest.fail.Exception):
        func(torch.ones(1, MIN_NUMEL, dtype=torch.bfloat16))
