"""
The C++ code of attention: all layouts, sizes and options against float64, and what happens where it can't be compiled.
"""

from __future__ import annotations
from typing import NamedTuple, Optional, Tuple
import math
import shutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from returnn_upcast.ops import attention as module
from returnn_upcast.ops import attention_native as native
from returnn_upcast.ops.attention import attention, rel_pos_attention
from returnn_upcast.ops.attention_fused import BlockAttention
from returnn_upcast.ops.attention_plain import Inputs, Options
import references
from tolerances import relative_error

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

# Largest error of one rounding: single elements show it, where tolerances of norms speak of the average
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}


def _reference(x: Inputs, options: Options) -> torch.Tensor:
    """:param x: q, k, v, pos and the biases in float64"""
    names = ("pos", "bias_u", "bias_v", "mask", "keep")
    kwargs = dict(causal=options.causal, scale=options.scale, keep_scale=options.keep_scale)
    return references.attention(x.q, x.k, x.v, **{name: getattr(x, name) for name in names}, **kwargs)


class Case(NamedTuple):
    """What one random attention is made of"""

    seed: int
    dtype: torch.dtype
    lead: Tuple[int, ...]
    queries: int
    keys: int
    features: int
    v_features: int
    causal: bool
    relative: bool
    biases: Optional[torch.dtype]  # of the queries
    mask: Optional[str]
    dropout: bool


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    lead=st.sampled_from([(1,), (3,), (2, 3), (2, 1, 2)]),
    queries=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 130]),
    keys=st.sampled_from([1, 3, 16, 17, 64, 100, 255, 256, 257]),
    features=st.sampled_from([1, 3, 16, 17, 64, 80]),
    v_features=st.sampled_from([1, 5, 16, 33, 64]),
    causal=st.booleans(),
    relative=st.booleans(),
    biases=st.sampled_from([None, torch.float32, torch.bfloat16]),
    mask=st.sampled_from([None, "lengths", "keys", "all"]),
    dropout=st.booleans(),
)


def _inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    number = lambda n: int(torch.randint(n, (), generator=generator))
    lead = lambda: tuple(1 if number(4) == 0 else n for n in case.lead)  # some broadcast

    def some(rows: int, columns: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        x = torch.randn(*lead(), rows, columns, generator=generator).to(dtype)
        layout = number(4)
        if layout == 1:
            return x.mT.contiguous().mT
        if layout == 2:
            return torch.cat([x, x], -1)[..., :columns]
        return x.transpose(0, -2).contiguous().transpose(0, -2) if layout == 3 else x

    queries, keys, features = case.queries, case.keys, case.features
    bias = lambda: None if case.biases is None else some(1, features, case.biases)
    masks = {
        None: lambda: None,
        "lengths": lambda: torch.arange(keys) < torch.randint(keys + 1, (*lead(), 1, 1), generator=generator),
        "keys": lambda: torch.rand(*lead(), 1, keys, generator=generator) < 0.7,
        "all": lambda: torch.rand(*lead(), queries, keys, generator=generator) < 0.3,
    }
    return Inputs(
        some(queries, features),
        some(keys, features),
        some(keys, case.v_features),
        some(queries + keys - 1, features) if case.relative else None,
        bias(),
        bias() if case.relative else None,
        mask=masks[case.mask](),
        keep=torch.rand(*lead(), queries, keys, generator=generator) < 0.8 if case.dropout else None,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases)
def test_all_layouts(case: Case):
    inputs = _inputs(case)
    options = Options(case.causal, case.features**-0.5, 1.25 if case.dropout else 1.0)
    leaves = [x if x is None else x.detach().requires_grad_(True) for x in inputs[:6]]
    wide = [x if x is None else x.detach().double().requires_grad_(True) for x in inputs[:6]]
    out = native.NativeAttention.apply(options, *leaves, *inputs[6:])
    expected = _reference(Inputs(*wide, *inputs[6:]), options)
    assert out.shape == expected.shape and out.dtype == case.dtype
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.seed)).to(case.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert relative_error(out, expected.detach()) <= ROUNDING[case.dtype]
    for a, b in zip(leaves, wide):
        if a is not None:
            # where a gradient cancels, the rest is as large as float32 leaves it
            rest = 1e-5 * float(grad.double().norm())
            assert float((a.grad.double() - b.grad).norm()) <= ROUNDING[a.dtype] * float(b.grad.norm()) + rest


def _qkv(queries: int = 100, keys: int = 100) -> Tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(8, n, 16, generator=generator).to(torch.bfloat16).requires_grad_(True)
        for n in (queries, keys, keys)
    )


@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0])
@pytest.mark.usefixtures("attention_path")
def test_common_offset_of_the_energies(offset):
    """the gradient of a bias that is large, but the same for all keys, cancels: a kept log-sum-exp would not do"""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 17, 8, generator=generator) for _ in range(3)]
    bias = torch.randn(2, 1, 8, generator=generator)
    inputs[1][..., 0], bias[..., 0] = 1.0, offset
    leaves = [x.to(torch.bfloat16).requires_grad_(True) for x in inputs] + [bias.requires_grad_(True)]
    wide = [x.detach().double().requires_grad_(True) for x in leaves]
    out = _rel_pos(*leaves[:3], bias_u=leaves[3])
    expected = _reference(Inputs(*wide[:3], bias_u=wide[3]), Options(False, 8**-0.5, 1.0))
    out.backward(torch.ones_like(out))
    expected.sum().backward()
    for a, b in zip(leaves[:3], wide):
        assert relative_error(a.grad, b.grad) <= ROUNDING[a.dtype] + 1e-7 * offset
    # ulp of the energies
    assert relative_error(leaves[3].grad, wide[3].grad) <= 1e-5 + 3e-8 * offset


def _rel_pos(q, k, v, *, bias_u):
    pos = torch.zeros(1, q.shape[-2] + k.shape[-2] - 1, q.shape[-1], dtype=q.dtype)
    return rel_pos_attention(q, k, v, pos, bias_u=bias_u)


def test_padding_of_a_block_is_never_nan():
    """A key of NaN that a mask over queries and keys hides; the block has 17 queries, and padding that no mask knows"""
    q, k, v = _qkv(17, 200)
    with torch.no_grad():
        k[:, 5] = math.nan
    mask = (torch.arange(200) != 5).expand(8, 17, 200).contiguous()
    native.NativeAttention.apply(
        Options(False, 0.25, 1.0), q, k, v, None, None, None, None, mask, None
    ).sum().backward()
    assert k.grad.isfinite().all() and v.grad.isfinite().all()


@pytest.mark.usefixtures("attention_path")
def test_inputs_for_other_paths():
    """what the C++ code would read wrongly by pointer"""
    q, k, v = (x.detach() for x in _qkv())
    blocks = lambda *args: BlockAttention.apply(Options(False, 0.25, 1.0), *Inputs(*args))
    pos, each_query = torch.randn(1, 199, 16), torch.randn(1, 100, 16)
    expected = blocks(q, k, v)
    assert torch.equal(attention(torch._neg_view(-q), k, v), expected)
    assert torch.equal(rel_pos_attention(q, k, v, pos), blocks(q, k, v, pos))
    assert torch.equal(
        _rel_pos(q, k, v, bias_u=each_query), blocks(q, k, v, torch.zeros_like(pos, dtype=q.dtype), each_query)
    )
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    assert torch.equal(attention(zero, k, v), blocks(torch.zeros_like(q), k, v))
    for args in [(q, k, v[:, :50]), (q, k[..., :8], v)]:
        with pytest.raises(RuntimeError):
            attention(*args)
    mask = torch.ones(1, 100, 100, dtype=torch.int64)
    assert torch.equal(attention(q, k, v, mask=mask), blocks(q, k, v, None, None, None, None, mask))
    for features, v_features in [(0, 16), (16, 0), (0, 0)]:
        out = attention(q[..., :features], k[..., :features], v[..., :v_features], scale=1.0)
        assert torch.equal(out, blocks(q[..., :features], k[..., :features], v[..., :v_features]))


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_first_use_under_other_defaults(default, forget_native):
    q, k, v = _qkv()
    forget_native()
    dtype = torch.get_default_dtype()
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.bfloat16)
            assert attention(q, k, v).dtype == torch.bfloat16
        else:
            with torch.device("meta"):
                assert attention(q, k, v).device.type == "cpu"
    finally:
        torch.set_default_dtype(dtype)
    assert native.function.is_available()


# with the second one, by the plain path
BIASES = [{}, {"bias": torch.zeros(100, 100, requires_grad=True)}]


@pytest.mark.usefixtures("attention_path")
@pytest.mark.parametrize("bias", BIASES, ids=["fused", "plain"])
def test_masked_keys_have_no_gradient_where_another_key_is_nan(bias):
    q, k, v = _qkv()
    with torch.no_grad():
        k[:, 10] = math.nan
    mask = (torch.arange(100) != 50).expand(8, 100, 100)
    attention(q, k, v, mask=mask, **bias).sum().backward()
    for x in (k, v):
        assert not x.grad[:, 50].any() and x.grad[:, 51:].isnan().all()


@pytest.mark.usefixtures("attention_path")
@pytest.mark.parametrize("bias", BIASES, ids=["fused", "plain"])
def test_values_of_the_future_have_no_gradient_of_a_nan_query(bias):
    q, k, v = _qkv()
    with torch.no_grad():
        q[:, 10] = math.nan
    attention(q, k, v, is_causal=True, **bias).sum().backward()
    assert v.grad[:, :11].isnan().all() and v.grad[:, 11:].isfinite().all()


@pytest.mark.usefixtures("attention_path")
@pytest.mark.parametrize("bias", BIASES, ids=["fused", "plain"])
def test_mask_and_causality_leave_no_key(bias):
    """the first 20 queries give 0, and get no gradient"""
    leaves = _qkv()
    mask = torch.arange(100) >= 20
    wide = [x.detach().double().requires_grad_(True) for x in leaves]
    out = attention(*leaves, mask=mask.expand(8, 100, 100), is_causal=True, **bias)
    expected = references.attention(*wide, scale=0.25, mask=mask, causal=True)
    out.sum().backward()
    expected.sum().backward()
    assert not out[:, :20].any() and relative_error(out.detach(), expected.detach()) <= ROUNDING[out.dtype]
    assert not leaves[0].grad[:, :20].any()
    for a, b in zip(leaves, wide):
        assert relative_error(a.grad, b.grad) <= ROUNDING[a.dtype]


def test_does_not_depend_on_the_threads():
    q, k, v = _qkv()
    expected = attention(q, k, v, is_causal=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(attention(q, k, v, is_causal=True), expected)
    finally:
        torch.set_num_threads(threads)


def test_sizes_without_elements(monkeypatch):
    monkeypatch.setattr(native, "MIN_ENERGIES", 0)
    for lead, queries, keys in [((0,), 5, 5), ((2,), 0, 5), ((2,), 5, 0), ((2, 0), 5, 5)]:
        q, k, v = (torch.randn(*lead, n, 8).to(torch.bfloat16).requires_grad_(True) for n in (queries, keys, keys))
        out = attention(q, k, v)
        out.sum().backward()
        assert out.shape == q.shape and not out.any() and not any(x.grad.any() for x in (q, k, v))


def test_blocks_where_it_cannot_be_compiled(lose_native, monkeypatch):
    """the same numbers"""
    q, k, v = _qkv()
    expected = attention(q, k, v)
    logged = lose_native()
    monkeypatch.setattr(module, "_logged", set())
    for _ in range(2):
        out = attention(q, k, v)
    assert relative_error(out.detach(), expected.detach().double()) <= ROUNDING[torch.bfloat16]
    messages = logged()
    assert [m.split("'")[1] for m in messages if "runs by path" in m] == ["blocks"]
    assert all("no native attention" in m for m in messages if "no native" in m)


def test_nobody_waits_for_a_compiler_for_small_inputs(forget_native, monkeypatch):
    forget_native()
    monkeypatch.setattr(native.function, "_load", lambda: pytest.fail("compiled"))
    q, k, v = _qkv(8, math.ceil(native.MIN_ENERGIES / 64) - 1)
    attention(q, k, v)
