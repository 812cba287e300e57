"""
Properties of all ops, on random layouts, lengths and special values: NaN and inf are where the float64 formula has them.

A difference is allowed where float32 has no larger numbers (:attr:`property_cases.Op.limit`), and nowhere a NaN that
stock RETURNN has not.
"""

from __future__ import annotations
from typing import List, Optional, Sequence
import math
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
import returnn.frontend as rf
from returnn.tensor import Dim
import references
from common import name_of, seq_dim, setting, tensor, values
from property_cases import OPS, Layout, Numbers, Op, backward, run
from returnn_upcast.ops import fuse, rows_native
from returnn_upcast.ops.attention import attention
from returnn_upcast.ops.matmul import split_matmul
from returnn_upcast.ops.norm import normalize
from tolerances import assert_close, assert_within_one_rounding

settings.register_profile(
    "returnn_upcast",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PROFILE = settings.get_profile("returnn_upcast")
LOW = (torch.bfloat16, torch.float16)
SPECIALS = ("none", "inf", "-inf", "nan", "max", "-max", "tiny", "zero")


def special_value(name: str, low: torch.dtype, limit: float = math.inf) -> Optional[float]:
    """:return: of the name. The largest number is that of the dtype, or what float32 can compute with"""
    largest = min(torch.finfo(low).max, limit)
    tiny = torch.finfo(low).smallest_normal / 4  # a denormal
    table = {"none": None, "max": largest, "-max": -largest, "tiny": tiny, "zero": 0.0}
    return table[name] if name in table else float(name)


lengths = st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any).map(tuple)


@st.composite
def layouts(draw, op: Op) -> Layout:
    """:return: random, for the op"""
    low = draw(st.sampled_from(LOW))
    return Layout(
        lens=draw(lengths),
        low=low,
        beam=draw(st.integers(1, 2)),
        order=tuple(draw(st.permutations(range(4)))),
        view=draw(st.booleans()),
        special=special_value(draw(st.sampled_from(SPECIALS)), low, op.limit),
        seed=draw(st.integers(0, 1000)) * 100,
    )


def _expected(op: Op, la: Layout) -> List[Numbers]:
    leaves = [x.double().requires_grad_() for x in op.inputs(la)]
    outs = op.formula(la, *leaves)
    return [backward(op, la, out, leaves) for out in (outs if isinstance(outs, tuple) else (outs,))]


def _kinds(x: torch.Tensor) -> torch.Tensor:
    """:return: 0 finite, 1 inf, 2 -inf, 3 NaN"""
    return x.isposinf().int() + 2 * x.isneginf().int() + 3 * x.isnan().int()


def _at_edge(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:return: whether a rounding decides if it is inf"""
    edge = torch.finfo(dtype).max
    return (x.abs() > 0.98 * edge) & (x.abs() < 1.02 * edge)


def _assert_like(value: torch.Tensor, expected: Sequence[torch.Tensor], what: str):
    """value has NaN and inf as one of the expected, and the finite numbers"""
    low = [e.to(value.dtype) for e in expected]
    allowed = torch.stack([(_kinds(value) == _kinds(x)) | _at_edge(e, value.dtype) for x, e in zip(low, expected)])
    bad = ~allowed.any(0) | (value.isnan() & ~torch.stack(low).isnan().any(0))
    assert not bad.any(), (what, value[bad][:5], [x[bad][:5] for x in expected])
    for x, e in zip(low, expected):
        finite = torch.isfinite(x) & torch.isfinite(value)
        if not finite.any():
            continue
        error = (value.double() - e)[finite].abs()
        largest = e[finite].abs().max()
        limit = 2 * torch.finfo(value.dtype).eps * e[finite].abs() + 2e-6 * largest
        assert (error <= limit + torch.finfo(value.dtype).smallest_normal).all(), (what, (error - limit).max())


def check(op: Op, la: Layout):
    """All that holds for any op and layout"""
    ours, expected = run(op, la, "on"), _expected(op, la)
    _assert_like(ours.out, [e.out for e in expected], "output")
    for i, grad in enumerate(ours.grads):
        references_ = [e.grads[i] for e in expected]
        finite = torch.stack([torch.isfinite(r.to(grad.dtype)) & ~_at_edge(r, grad.dtype) for r in references_]).all(0)
        assert torch.isfinite(grad[finite]).all(), f"gradient {i}"
        if la.special is not None:  # beside 1e17, float32 has no digits for the others
            continue
        error = (grad.double() - references_[0])[finite].abs()
        size, eps = references_[0][finite].abs(), torch.finfo(grad.dtype).eps
        limit = eps * size + 2e-5 * size.sum() + 1e-6
        assert (error <= limit).all(), (f"gradient {i}", (error - limit).max())
    if not op.stock:
        return
    try:
        stock = run(op, la, "off")
    except (RuntimeError, NotImplementedError):  # no CTC in f16, and the like
        return
    for ours_, stock_ in zip((ours.out, *ours.grads), (stock.out, *stock.grads)):
        assert not (ours_.isnan() & torch.isfinite(stock_)).any(), "NaN where stock is finite"


@pytest.fixture(autouse=True)
def on(fresh_returnn):
    """once per test, as the hooks take longer to put in place than a property to check"""
    with setting("on"):
        yield


@pytest.mark.parametrize("op", OPS, ids=str)
def test_any_layout_and_special_values(op: Op):
    @settings(PROFILE, max_examples=24)
    @given(layouts(op))
    def any_layout(la: Layout):
        check(op, la)

    any_layout()


NATIVE = ("LayerNorm", "RMSNorm", "ctc_loss", "upcast.log_softmax, features")


@pytest.mark.parametrize("op", [op for op in OPS if op.name in NATIVE], ids=str)
def test_native_kernels(op: Op, monkeypatch):
    """as above, in C++ code, which runs for larger inputs otherwise"""
    monkeypatch.setattr(rows_native, "MIN_NUMEL", 1)
    test_any_layout_and_special_values(op)


COMPILED = [op for op in OPS if op.name in (*NATIVE[:3], "RoPE") or "logits, sparse" in op.name]


@pytest.mark.parametrize("op", COMPILED, ids=str)
def test_compiled_kernels(op: Op, monkeypatch):
    """large enough to be compiled; all special values, one compilation"""
    monkeypatch.setattr(rows_native, "MIN_NUMEL", math.inf)
    frames = 260 if op.name == "ctc_loss" else 1100
    for special in (special_value(name, torch.bfloat16, op.limit) for name in SPECIALS):
        la = Layout((frames, 1, 0, 3), torch.bfloat16, feat=32, special=special)
        assert math.prod(la.shape) >= fuse.MIN_COMPILE_NUMEL
        check(op, la)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("low", LOW)
def test_ctc_with_a_forbidden_label(low: torch.dtype, normalized: bool, packed: bool):
    """of logit -inf: as if there were no such label. torch's kernel has NaN as its gradient, and stock in all of the row"""
    batch, kept = Dim(3, name="batch"), [0, 1, 2, 4, 5, 6, 7]
    time, labels = seq_dim("time", (6, 4, 2), batch), seq_dim("labels", (2, 1, 0), batch)
    raw = values(3, 6, 8, seed=1, std=2.0).to(low)
    raw[..., 3] = -math.inf
    raw = raw.double().log_softmax(-1).to(low) if normalized else raw
    results = []
    for x in (raw, raw[..., kept]):
        feat, leaf = Dim(x.shape[-1], name="feat"), x.clone().requires_grad_()
        targets = rf.convert_to_tensor(torch.tensor([[1, 2], [0, 0], [0, 0]]), dims=(batch, labels), sparse_dim=feat)
        logits = tensor(leaf, batch, time, feat, feature_dim=feat)
        loss = rf.ctc_loss(
            logits=rf.pack(logits, dims=(batch, time)) if packed else logits, logits_normalized=normalized,
            targets=targets, input_spatial_dim=time, targets_spatial_dim=labels, blank_index=len(leaf[0, 0]) - 1,
        )  # fmt: skip
        loss.raw_tensor.sum().backward()
        results.append((loss.raw_tensor.detach(), leaf.grad))
    (loss, grad), (expected, expected_grad) = results
    assert torch.allclose(loss, expected, rtol=1e-6) and (grad[..., 3] == 0).all()
    assert_within_one_rounding(grad[..., kept], expected_grad)


def test_gradient_of_log_probs_that_are_inf():
    """it is minus the target, whatever they are"""
    batch, feat = Dim(2, name="batch"), Dim(4, name="feat")
    x = torch.tensor([[0.0, math.inf, -1.0, math.nan], [-math.inf, 100.0, -2.0, -3.0]], dtype=torch.bfloat16)
    x.requires_grad_()
    target = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.0, 0.5, 0.25, 0.25]], dtype=torch.bfloat16)
    kwargs = dict(target=tensor(target, batch, feat), axis=feat, estimated_type="log-probs")
    rf.cross_entropy(estimated=tensor(x, batch, feat), **kwargs).raw_tensor.sum().backward()
    assert torch.equal(x.grad, -target)


# Without dot attention: stock scales the queries before the product, so its energies overflow a little later.
BEYOND = [
    op
    for op in OPS
    if op.limit < 1e38 and op.name not in [f"attention, {a}" for a in ("keys padded", "causal", "masked")]
]


@pytest.mark.parametrize("op", BEYOND, ids=str)
def test_beyond_the_range_of_float32_as_stock(op: Op):
    """the largest bf16, where squares, products and sums overflow: NaN only where stock RETURNN has NaN"""
    for sign in (1, -1):
        for seed in range(3):
            la = Layout((4, 2), torch.bfloat16, special=sign * torch.finfo(torch.bfloat16).max, seed=100 * seed)
            ours, stock = run(op, la, "on"), run(op, la, "off")
            for ours_, stock_ in zip((ours.out, *ours.grads), (stock.out, *stock.grads)):
                assert not (ours_.isnan() & torch.isfinite(stock_)).any()


@st.composite
def broadcasts(draw):
    """:return: shape, axes of the statistics, and shapes that broadcast to it, of scale, bias and mask"""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    part = lambda: [n if draw(st.booleans()) else 1 for n in shape]
    return shape, sorted(axes), part(), part(), part(), draw(st.integers(0, 1000)), draw(st.sampled_from(LOW))


@settings(PROFILE, max_examples=60)
@given(broadcasts(), st.booleans(), st.booleans())
def test_norm_with_any_broadcast_scale_bias_and_mask(case, center: bool, masked: bool):
    shape, axes, scale_shape, bias_shape, mask_shape, seed, low = case
    x, scale, bias = (
        values(*s, seed=seed + i, mean=2.0).to(low) for i, s in enumerate((shape, scale_shape, bias_shape))
    )
    mask = values(*mask_shape, seed=seed + 3) > -0.5 if masked else None
    leaves = [t.clone().requires_grad_() for t in (x, scale, bias)]
    wide = [t.double().requires_grad_() for t in (x, scale, bias)]
    out, _, _ = normalize(leaves[0], axes=axes, scale=leaves[1], bias=leaves[2], mask=mask, eps=1e-3, center=center)
    counts = torch.ones(shape, dtype=torch.float64) if mask is None else mask.expand(shape).double()
    average = lambda t: (t * counts).sum(axes, keepdim=True) / counts.sum(axes, keepdim=True).clamp(min=1)
    mean = average(wide[0]) if center else 0.0
    expected = (wide[0] - mean) / torch.sqrt(average((wide[0] - mean) ** 2) + 1e-3) * wide[1] + wide[2]
    upstream = values(*shape, seed=seed + 4).to(low)
    pairs = [(out, expected.detach())]
    pairs += zip(torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, wide, upstream.double()))
    for value, reference in pairs:
        assert value.dtype == low
        error = (value.double() - reference).abs()
        # rounding, and float32 noise on values that rsqrt(eps) may enlarge
        assert (error <= torch.finfo(low).eps * reference.abs() + 2e-5 * (1 + reference.abs().max())).all()


@settings(PROFILE, max_examples=40)
@given(st.data())
def test_attention_with_any_broadcast_batch(data):
    low, seed = data.draw(st.sampled_from(LOW)), data.draw(st.integers(0, 1000))
    lead = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    part = lambda: [n if data.draw(st.booleans()) else 1 for n in lead][data.draw(st.integers(0, len(lead))) :]
    queries, keys = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    shapes = (*part(), queries, 4), (*part(), keys, 4), (*part(), keys, 3)
    mask = values(*part(), queries, keys, seed=seed + 4) > -0.5
    raws = [values(*s, seed=seed + i).to(low) for i, s in enumerate(shapes)]
    leaves, wide = [r.clone().requires_grad_() for r in raws], [r.double().requires_grad_() for r in raws]
    out = attention(*leaves, mask=mask)
    weights = (wide[0] @ wide[1].mT / 2).masked_fill(~mask, -math.inf).softmax(-1)
    expected = torch.where(mask, weights, 0.0) @ wide[2]
    assert out.shape == expected.shape and out.dtype == low
    upstream = values(*out.shape, seed=seed + 5).to(low)
    pairs = [(out, expected.detach())]
    pairs += zip(torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, wide, upstream.double()))
    for value, reference in pairs:
        reference = reference.nan_to_num()  # softmax over nothing
        error = (value.double() - reference).abs()
        assert (error <= torch.finfo(low).eps * reference.abs() + 1e-5 * (1 + reference.abs().max())).all()


@settings(PROFILE, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 70_000), st.integers(2, 9), st.sampled_from(LOW))
def test_encodings_of_any_size(queries: int, keys: int, offset: int, half: int, low: torch.dtype):
    time, other, feat = Dim(queries, name="time"), Dim(keys, name="keys"), Dim(2 * half, name="feat")
    kwargs = dict(feat_dim=feat, dtype=name_of(low))
    out = rf.sinusoidal_positional_encoding(spatial_dim=time, offset=offset, **kwargs)
    expected = references.sinusoidal(range(offset, offset + queries), 2 * half)
    assert_close(out.copy_compatible_to_dims_raw([time, feat]), expected, 1.0001, what="sinusoidal")
    out, positions = rf.relative_positional_encoding(query_spatial_dim=time, key_value_spatial_dim=other, **kwargs)
    expected = references.relative(queries, keys, 2 * half)
    assert_close(out.copy_compatible_to_dims_raw([positions, feat]), expected, 1.0001, what="relative")


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, 3.4e38])
def test_product_split_in_two_keeps_rows_apart(low: torch.dtype, special: float):
    """what a GPU does with a float32 operand: inf minus inf is no NaN there, and a row no matter of the others"""
    a, b = values(4, 6, seed=1).float(), values(6, 5, seed=2).to(low)
    a[1, 2] = special
    mm = lambda x, y: (x.double() @ y.double()).float()
    out, expected = split_matmul(a, b, mm), a.double() @ b.double()
    usual = torch.tensor([0, 2, 3])
    if low != torch.bfloat16 or not math.isfinite(special):  # 3.4e38 is inf in bf16
        assert (_kinds(out) == _kinds(expected.float())).all()
    assert torch.allclose(out[usual].double(), expected[usual], rtol=2e-5, atol=2e-5)
