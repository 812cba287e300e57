"""
The raw attention ops: gradients of all inputs in blocks of several sizes, paths, tracing and derivatives of derivatives.
"""

from __future__ import annotations
import logging
import math
import pytest
import torch
from returnn_upcast.ops import attention as module
from returnn_upcast.ops import attention_blocks
from returnn_upcast.ops.attention import attention, rel_pos_attention
import references
from tolerances import relative_error, tolerance

pytestmark = pytest.mark.usefixtures("attention_path")


def _randn(*shape, seed, std=1.0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * std


def _rel_pos_reference(q, k, v, pos, u, w):
    return references.attention(q, k, v, pos=pos, bias_u=u, bias_v=w, scale=q.shape[-1] ** -0.5)


def _check(op, reference, inputs, low, factors=(1.4, 3.0), **kwargs):
    """:param inputs: low-precision ones, and wider ones for biases"""
    wide = [x.double().requires_grad_(True) for x in inputs]
    leaves = [x.clone().requires_grad_(True) for x in inputs]
    expected, out = reference(*wide), op(*leaves, **kwargs)
    grad = _randn(*expected.shape, seed=99).to(low)
    expected.backward(grad.double())
    out.backward(grad)
    assert out.dtype == low and all(x.grad.dtype == x.dtype for x in leaves)
    assert relative_error(out, expected.detach()) <= tolerance(expected.detach(), low, factors[0])
    for i, (a, b) in enumerate(zip(leaves, wide)):
        # wider gradients come from sums of products of which one operand was rounded
        assert relative_error(a.grad, b.grad) <= tolerance(b.grad, low, factors[1]), i
    return out


def _rel_pos_inputs(low, queries, keys, dim, bias_dtype):
    shapes = [(2, 3, queries, dim), (2, 3, keys, dim), (2, 3, keys, dim), (1, 3, queries + keys - 1, dim)]
    inputs = [_randn(*shape, seed=i).to(low) for i, shape in enumerate(shapes)]
    return inputs + [_randn(1, 3, 1, dim, seed=7 + i, std=0.5).to(bias_dtype) for i in (0, 1)]


def _rel_pos(q, k, v, pos, u, w, **kwargs):
    return rel_pos_attention(q, k, v, pos, bias_u=u, bias_v=w, **kwargs)


@pytest.mark.parametrize("bias_dtype", [torch.float32, None])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "queries, keys, dim", [(16, 16, 24), (22, 22, 24), (23, 23, 24), (1, 9, 16), (7, 5, 8), (150, 150, 8)]
)
def test_rel_pos_gradients(low, queries, keys, dim, bias_dtype):
    """small odd sizes once gave wrong, non-deterministic gradients"""
    inputs = _rel_pos_inputs(low, queries, keys, dim, bias_dtype or low)
    first = _check(_rel_pos, _rel_pos_reference, inputs, low)
    assert torch.equal(first, _rel_pos(*inputs))


@pytest.mark.parametrize("sizes", [(64, 3, 1), (200, 4, 2), (10_000, 8, 4)])
def test_size_of_blocks_does_not_matter(sizes, monkeypatch):
    monkeypatch.setitem(attention_blocks._SIZES, "cpu", sizes)
    low = torch.bfloat16
    _check(_rel_pos, _rel_pos_reference, _rel_pos_inputs(low, 13, 11, 8, torch.float32), low)
    q, k, v = (_randn(2, 3, 17, 8, seed=i).to(low) for i in range(3))
    past = torch.ones(17, 17).tril().bool()

    def reference(q, k, v):
        return (q @ k.mT * 8**-0.5).masked_fill(~past, -math.inf).softmax(-1) @ v

    _check(lambda *args: attention(*args, is_causal=True), reference, (q, k, v), low)


def test_bias_gets_its_gradient():
    low = torch.bfloat16
    q, k, v = (_randn(2, 5, 8, seed=i).to(low) for i in range(3))
    bias = _randn(2, 5, 5, seed=4).float()
    reference = lambda q, k, v, b: (q @ k.mT * 8**-0.5 + b).softmax(-1) @ v
    _check(lambda q, k, v, b: attention(q, k, v, bias=b), reference, (q, k, v, bias), low)


@pytest.mark.parametrize("shape", [(5, 8), (0, 5, 8), (2, 0, 8), (2, 1, 8)])
def test_odd_shapes(shape):
    q, k, v = (_randn(*shape, seed=i).to(torch.bfloat16).requires_grad_(True) for i in range(3))
    out = attention(q, k, v)
    out.sum().backward()
    assert out.shape == shape and all(x.grad.shape == shape for x in (q, k, v))
    expected = (q.double() @ k.double().mT * 8**-0.5).softmax(-1) @ v.double()
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=2**-7)


def test_broadcast_leading_axes():
    low = torch.bfloat16
    q, k, v = _randn(4, 3, 6, 8, seed=0).to(low), _randn(1, 3, 5, 8, seed=1).to(low), _randn(4, 1, 5, 8, seed=2).to(low)
    _check(attention, lambda q, k, v: (q @ k.mT * 8**-0.5).softmax(-1) @ v, (q, k, v), low)


def test_masked_rows_are_zero():
    q, k, v = (_randn(2, 5, 8, seed=i).to(torch.bfloat16).requires_grad_(True) for i in range(3))
    mask = torch.tensor([True, False])[:, None, None].expand(2, 1, 5)
    out = attention(q, k, v, mask=mask)
    out.sum().backward()
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert all(torch.isfinite(x.grad).all() and (x.grad[1] == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("bias", (False, True))  # with a bias that needs a gradient, the plain path
def test_nan_in_the_future_does_not_reach_the_past(bias):
    q, k, v = (_randn(2, 300, 8, seed=i).to(torch.bfloat16) for i in range(3))
    bias = {"bias": torch.zeros(300, 300, requires_grad=True)} if bias else {}
    expected = attention(q, k, v, is_causal=True, **bias)
    k[:, 250] = math.nan
    out = attention(q, k, v, is_causal=True, **bias)
    assert torch.equal(out[:, :250], expected[:, :250])
    assert out[:, 250:].isnan().all()


def test_dropout_is_the_same_in_backward():
    """v = identity shows the mask, with which the reference then computes"""
    low, n = torch.bfloat16, 24
    q, k = (_randn(3, n, 8, seed=i).to(low) for i in range(2))
    torch.manual_seed(5)
    keep = attention(q, k, torch.eye(n).to(low).expand(3, n, n), dropout=0.3) != 0
    assert 0.6 < float(keep.double().mean()) < 0.8
    factor = 1 / (1 - round(0.3 * 2**16) / 2**16)

    def op(q, k, v):
        torch.manual_seed(5)
        return attention(q, k, v, dropout=0.3)

    reference = lambda q, k, v: ((q @ k.mT * 8**-0.5).softmax(-1) * keep * factor) @ v
    _check(op, reference, (q, k, _randn(3, n, 8, seed=3).to(low)), low)


def test_nothing_quadratic_is_kept():
    q, k, v = (_randn(2, 300, 8, seed=i).to(torch.bfloat16).requires_grad_(True) for i in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention(q, k, v)
    assert sum(t.numel() for t in kept) <= 3 * q.numel()
    assert all(t.dtype == torch.bfloat16 for t in kept)


def test_plain_where_somebody_traces_or_differentiates():
    q, k, v = (_randn(2, 5, 8, seed=i).to(torch.bfloat16) for i in range(3))
    expected = attention(q, k, v)
    from torch.fx.experimental.proxy_tensor import make_fx

    assert torch.equal(make_fx(lambda *args: attention(*args))(q, k, v)(q, k, v), expected)
    func_grad = torch.func.grad(lambda q_: attention(q_, k, v).float().sum())(q)
    leaf = q.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(attention(leaf, k, v).float().sum(), leaf, create_graph=True)
    grad.float().square().sum().backward()
    assert torch.allclose(func_grad.float(), grad.float(), rtol=2**-6, atol=1e-3)
    wide = q.double().requires_grad_(True)
    (wide_grad,) = torch.autograd.grad(attention(wide, k.double(), v.double()).sum(), wide, create_graph=True)
    wide_grad.square().sum().backward()
    assert relative_error(leaf.grad, wide.grad) < 0.05


def test_says_once_which_path(attention_path, caplog):
    module._logged.clear()
    caplog.set_level(logging.DEBUG, "returnn.frontend.upcast")
    q = _randn(2, 5, 8, seed=0).to(torch.bfloat16)
    for _ in range(2):
        attention(q, q, q)
    assert [r.message.split("'")[1] for r in caplog.records] == [attention_path]


def test_wrong_number_of_positions():
    q = torch.zeros(2, 5, 8)
    with pytest.raises(ValueError, match="pos_emb has 8 positions, 9 are needed"):
        rel_pos_attention(q, q, q, torch.zeros(1, 8, 8))


@pytest.mark.parametrize("kind", ["negative view", "zeros without memory", "expanded"])
def test_any_gradient(kind):
    q, k, v = (_randn(8, 100, 16, seed=seed).to(torch.bfloat16).requires_grad_(True) for seed in range(3))
    grad = _randn(*q.shape, seed=3).to(q.dtype)
    grads = {
        "negative view": (torch._neg_view(grad), -grad),
        "zeros without memory": (torch._efficientzerotensor(q.shape, dtype=q.dtype), torch.zeros_like(grad)),
        "expanded": (grad[:1, :1, :1].expand(q.shape), grad[:1, :1, :1].repeat(*q.shape)),
    }
    found, expected = (torch.autograd.grad(attention(q, k, v), (q, k, v), g) for g in grads[kind])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
