"""
The same ops on a GPU: mixed dtypes, autocast's lists there, the fused kernels, and peak memory. Skipped without one.
"""

from __future__ import annotations
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import tensor, values
from returnn_upcast import upcast
from returnn_upcast.ops.attention import attention, rel_pos_attention
from returnn_upcast.ops.linear_loss import linear_cross_entropy, linear_f32
from returnn_upcast.ops.loss import cross_entropy
from returnn_upcast.ops.norm import normalize
from tolerances import assert_close, relative_error, tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LOWS = [torch.bfloat16, torch.float16]


def _check(op, inputs, *, out_factor, grad_factor, float32=1e-5):
    """op on the GPU in the inputs' dtypes, against op on the CPU in float64"""
    wide = [x.detach().double().requires_grad_(True) for x in inputs]
    leaves = [x.detach().cuda().requires_grad_(True) for x in inputs]
    expected, out = op(*wide), op(*leaves)
    grad = values(*expected.shape, seed=9).to(out.dtype)
    expected.backward(grad.double())
    out.backward(grad.cuda())
    assert_close(out.cpu(), expected.detach(), out_factor, float32=float32)
    for i, (a, b) in enumerate(zip(leaves, wide)):
        assert relative_error(a.grad.cpu(), b.grad) <= tolerance(b.grad, a.dtype, grad_factor, float32=float32), i


@pytest.mark.parametrize("param", [torch.float32, None])
@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("shape", [(2, 7, 32), (16, 300, 512)])
def test_norm_with_mixed_dtypes(shape, low, param):
    x = values(*shape, seed=1, mean=5.0, std=3.0).to(low)
    scale, bias = (values(1, 1, shape[-1], seed=i).to(param or low) for i in (2, 3))
    op = lambda x, s, b: normalize(x, axes=(-1,), scale=s, bias=b, eps=1e-6)[0]
    _check(op, (x, scale, bias), out_factor=1.02, grad_factor=1.1)


@pytest.mark.parametrize("kind", ["plain", "causal", "padding"])
@pytest.mark.parametrize("low", LOWS)
def test_attention(low, kind):
    q, k, v = (values(2, 4, 65, 64, seed=i, std=2.0).to(low) for i in range(3))
    mask = (torch.arange(65)[None] < torch.tensor([65, 20])[:, None])[:, None, None]

    def op(q, k, v):
        return attention(q, k, v, is_causal=kind == "causal", mask=mask.to(q.device) if kind == "padding" else None)

    _check(op, (q, k, v), out_factor=1.4, grad_factor=3.0)


def test_masked_rows_and_dropout():
    q, k, v = (values(2, 4, 17, 64, seed=i).to(torch.bfloat16).cuda().requires_grad_(True) for i in range(3))
    mask = torch.tensor([True, False], device="cuda")[:, None, None, None].expand(2, 1, 1, 17)
    out = attention(q, k, v, mask=mask, dropout=0.1)
    out.sum().backward()
    assert (out[1] == 0).all() and all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("low", LOWS)
def test_rel_pos_attention(low):
    inputs = [values(2, 4, n, 32, seed=i).to(low) for i, n in enumerate((21, 21, 21, 41))]
    biases = [values(1, 4, 1, 32, seed=i).float() for i in (7, 8)]
    op = lambda q, k, v, p, u, w: rel_pos_attention(q, k, v, p, bias_u=u, bias_v=w)
    _check(op, (*inputs, *biases), out_factor=1.4, grad_factor=3.0, float32=1e-2)


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("vocab", [11, 10_000])
def test_cross_entropy(low, vocab):
    x, target = values(40, vocab, seed=1, std=4.0).to(low), torch.arange(40) % vocab
    _check(lambda x: cross_entropy(x, target.to(x.device), axis=-1), (x,), out_factor=1.05, grad_factor=1.05)


@pytest.mark.parametrize("low", LOWS)
def test_linear(low):
    """mm(out_dtype=float32) has no derivative of its own"""
    x, weight, bias = values(40, 64, seed=1).to(low), values(64, 96, seed=2).to(low), values(96, seed=3).float()
    _check(linear_f32, (x, weight, bias), out_factor=1.05, grad_factor=1.1)
    target = torch.arange(40) % 96
    op = lambda x, w, b: linear_cross_entropy(x, w, b, target.to(x.device), float32_logits=True)
    _check(op, (x, weight, bias), out_factor=1.05, grad_factor=1.1)


@pytest.mark.parametrize("amp", [False, True])
def test_same_numbers_with_and_without_autocast(installed, amp):
    """CUDA's autocast runs layer_norm, softmax and sums in float32 by itself; here that changes nothing"""
    dim, batch = Dim(64, name="d"), Dim(8, name="b")
    x = values(8, 64, seed=1, mean=5.0).to(torch.bfloat16)
    with rf.set_default_device_ctx("cuda"):
        module = rf.RMSNorm(dim)
    with upcast.scope(True), torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
        out = module(tensor(x.cuda(), batch, dim)).raw_tensor
    reference = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(out.cpu(), reference, 1.02)


def test_peak_memory_of_a_norm():
    x = torch.randn(16, 1000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scale = torch.ones(1, 1, 1024, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        normalize(x, axes=(-1,), scale=scale, eps=1e-6)[0].sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        x.grad = None
    assert peak < 4 * x.numel() * x.element_size()  # output and gradients, but no float32 copy
