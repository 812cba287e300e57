"""
Attention through RETURNN: :func:`rf.dot_attention` and the backend's op, against float64.
"""

from __future__ import annotations
import inspect
import math
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
from attention_cases import LENS, B, H, K, T, batch, time
from common import MODES, inside, seq_dim, setting, tensor, values
from tolerances import relative_error, tolerance

S = 13
KEY_LENS = [13, 6, 2]
heads, feat, value_feat = Dim(H, name="heads"), Dim(K, name="key"), Dim(K + 4, name="value")
keys = seq_dim("keys", KEY_LENS, batch)
MODE_NAMES = ["bf16", "f16", "amp-bf16"]
OUTPUT, GRAD = 1.4, 3.0

pytestmark = pytest.mark.usefixtures("attention_path")


def _reference(q, k, v, *, key_lens=None, causal=False, mask=None, scale=None):
    """[B, T, H, K] each, float64, written out"""
    energies = torch.einsum("bthk,bshk->bhts", q, k) * (scale or q.shape[-1] ** -0.5)
    if key_lens:
        energies = energies.masked_fill(~inside(key_lens, k.shape[1])[:, None, None], -math.inf)
    if causal:
        energies = energies.masked_fill(torch.ones(q.shape[1], k.shape[1]).triu(1).bool(), -math.inf)
    if mask is not None:
        energies = energies + mask if mask.is_floating_point() else energies.masked_fill(~mask, -math.inf)
    return torch.einsum("bhts,bshk->bthk", energies.softmax(-1), v)


def _needs(parameter: str):
    """not all releases have it"""
    if parameter not in inspect.signature(rf.dot_attention).parameters:
        pytest.skip(f"this RETURNN's dot_attention has no {parameter}")


def _qkv(low, std=2.0, keys_=S):
    shapes = [(T, K, std), (keys_, K, std), (keys_, K + 4, 1.0)]
    return [values(B, n, H, d, seed=i, std=s).to(low) for i, (n, d, s) in enumerate(shapes)]


def _check(mode, call, reference, raws, *, mask=None, out_factor=OUTPUT, grad_factor=GRAD, stock_misses=True):
    """call(*raws) -> [B, T, H, V]; outputs and gradients of all raws with the upcast on, and that stock misses them"""
    mode = MODES[mode]
    mask = inside(LENS) if mask is None else mask
    grad = values(B, T, H, K + 4, seed=9).to(mode.low)
    leaves64 = [r.double().requires_grad_(True) for r in raws]
    expected = reference(*leaves64)
    (expected[mask] * grad.double()[mask]).sum().backward()
    errors = {}
    for name in ("on", "off") if stock_misses else ("on",):
        with setting(name, mode):
            leaves = [r.clone().requires_grad_(True) for r in raws]
            out = call(*leaves)
        (out[mask] * grad[mask]).sum().backward()
        pairs = [("output", out[mask], expected[mask].detach(), out_factor)]
        pairs += [(f"gradient {i}", a.grad, b.grad, grad_factor) for i, (a, b) in enumerate(zip(leaves, leaves64))]
        for what, value, ref, factor in pairs:
            errors[name, what] = relative_error(value, ref) / tolerance(ref, value.dtype, factor)
            assert name == "off" or errors[name, what] <= 1, (what, errors[name, what])
        if name == "on":
            assert out.dtype == mode.low and all(a.grad.dtype == a.dtype for a in leaves)
    if stock_misses:
        assert errors["off", "output"] > 1


def _dot(q, k, v, *, q_dims=None, **kwargs):
    out = rf.dot_attention(
        tensor(q, *(q_dims or (batch, time, heads, feat))),
        tensor(k, batch, keys, heads, feat),
        tensor(v, batch, keys, heads, value_feat),
        key_dim=feat,
        axis=keys,
        **kwargs,
    )
    return out.copy_compatible_to_dims_raw([batch, time, heads, value_feat])


@pytest.mark.parametrize("std", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_cross_attention_with_key_padding(mode, std):
    """std of the logits: 1, 4 and 16"""
    reference = lambda q, k, v: _reference(q, k, v, key_lens=KEY_LENS)
    _check(mode, _dot, reference, _qkv(MODES[mode].low, std), grad_factor=4.0 if std == 4 else GRAD)


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_scale(mode):
    _needs("scale")
    reference = lambda q, k, v: _reference(q, k, v, key_lens=KEY_LENS, scale=0.5)
    _check(mode, lambda *args: _dot(*args, scale=0.5), reference, _qkv(MODES[mode].low))


def test_float32_operands_under_autocast():
    """older behavior versions: the effective dtype is that of autocast, so the operands are rounded to it first"""
    raws = _qkv(torch.bfloat16)
    reference = lambda q, k, v: _reference(q, k, v, key_lens=KEY_LENS)
    call = lambda *args: _dot(*(a.float() for a in args))
    _check("amp-bf16", call, reference, raws)
    with setting("on", MODES["amp-bf16"]):
        unrounded = [r.float() * 1.001 for r in raws]
        rounded = [r.to(torch.bfloat16).float() for r in unrounded]
        assert torch.equal(_dot(*unrounded), _dot(*rounded))


@pytest.mark.parametrize("same_dim", [True, False])
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_causal(mode, same_dim):
    _needs("causal_query_spatial_dim")
    query_dim = time if same_dim else seq_dim("queries", LENS, batch)

    def call(q, k, v):
        out = rf.dot_attention(
            tensor(q, batch, query_dim, heads, feat),
            tensor(k, batch, time, heads, feat),
            tensor(v, batch, time, heads, value_feat),
            key_dim=feat,
            axis=time,
            causal_query_spatial_dim=query_dim,
        )
        return out.copy_compatible_to_dims_raw([batch, query_dim, heads, value_feat])

    reference = lambda q, k, v: _reference(q, k, v, causal=True)
    _check(mode, call, reference, _qkv(MODES[mode].low, keys_=T))


@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float32"])
def test_attention_mask(kind):
    """of the backend's op: bool, or added to the energies"""
    from returnn.torch.frontend import TorchBackend

    full, full_keys = Dim(T, name="full"), Dim(S, name="full_keys")
    mask = (
        values(B, 1, T, S, seed=7) > -0.5
        if kind == "bool"
        else (values(B, 1, T, S, seed=7) * 3).to(getattr(torch, kind))
    )
    mask[..., 0] = True if kind == "bool" else 0.0

    def call(q, k, v):
        out = TorchBackend.scaled_dot_product_attention(
            tensor(q, batch, full, heads, feat),
            tensor(k, batch, full_keys, heads, feat),
            tensor(v, batch, full_keys, heads, value_feat),
            attention_mask=tensor(mask[:, 0], batch, full, full_keys),
            att_dropout_broadcast=False,
            v_feat_dim=value_feat,
            qk_feat_dim=feat,
            kv_spatial_dim=full_keys,
            query_spatial_dim=full,
        )
        return out.copy_compatible_to_dims_raw([batch, full, heads, value_feat])

    mask64 = mask if kind == "bool" else mask.double()
    everything = torch.ones(B, T, dtype=torch.bool)
    reference = lambda q, k, v: _reference(q, k, v, mask=mask64)
    _check("bf16", call, reference, _qkv(torch.bfloat16), mask=everything, stock_misses=kind != "float32")


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_two_keys_of_cases(mode):
    """CASES.md: energies 40 and 40.1015625, weight of the second key"""
    d64, two, one = Dim(64, name="d"), Dim(2, name="two"), Dim(2, name="v")
    q, k, v = torch.zeros(64), torch.zeros(2, 64), torch.eye(2)
    q[:2], k[:, 0], k[1, 1] = torch.tensor([16.0, 1.0]), 20.0, 0.8125
    low, weight = MODES[mode].low, 0.5253688222550323
    results = {}
    for name in ("on", "off"):
        with setting(name, MODES[mode]):
            out = rf.dot_attention(
                tensor(q.to(low), d64), tensor(k.to(low), two, d64), tensor(v.to(low), two, one), key_dim=d64, axis=two
            )
        results[name] = float(out.raw_tensor[1])
    assert results["on"] == float(torch.tensor(weight).to(low)) != results["off"]


def test_dim_orders_and_extra_dims():
    """heads first, a beam that only the queries have, no batch dim: the same numbers"""
    beam = Dim(2, name="beam")
    q, k, v = _qkv(torch.bfloat16)
    with setting("on", MODES["bf16"]):
        plain = _dot(q, k, v)
        permuted = rf.dot_attention(
            tensor(q.permute(2, 3, 1, 0).contiguous(), heads, feat, time, batch),
            tensor(k.permute(1, 0, 3, 2).contiguous(), keys, batch, feat, heads),
            tensor(v.permute(3, 2, 1, 0).contiguous(), value_feat, heads, keys, batch),
            key_dim=feat,
            axis=keys,
        ).copy_compatible_to_dims_raw([batch, time, heads, value_feat])
        beams = rf.dot_attention(
            tensor(torch.stack([q, q.flip(1)], 1), batch, beam, time, heads, feat),
            tensor(k, batch, keys, heads, feat),
            tensor(v, batch, keys, heads, value_feat),
            key_dim=feat,
            axis=keys,
        ).copy_compatible_to_dims_raw([batch, beam, time, heads, value_feat])
    for other in (permuted, beams[:, 0], beams[:, 1].flip(1)):
        assert relative_error(other, plain.detach().double()) < 1e-3


def test_empty_sequence_stays_finite():
    lens = [13, 0, 5]
    empty = seq_dim("empty", lens, batch)
    q, k, v = (r.requires_grad_(True) for r in _qkv(torch.bfloat16))
    with setting("on", MODES["bf16"]):
        out = rf.dot_attention(
            tensor(q, batch, time, heads, feat),
            tensor(k, batch, empty, heads, feat),
            tensor(v, batch, empty, heads, value_feat),
            key_dim=feat,
            axis=empty,
        ).copy_compatible_to_dims_raw([batch, time, heads, value_feat])
    out[[0, 2]].sum().backward()
    assert torch.isfinite(out[[0, 2]]).all() and all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout(broadcast):
    """the weights are seen through v = identity: dropped or scaled, reproducible, and none outside of training"""
    ident = Dim(S, name="ident")
    q, k, _ = _qkv(torch.bfloat16, keys_=S)
    v = torch.eye(S, dtype=torch.bfloat16).expand(B, H, S, S).transpose(1, 2)
    full_keys = Dim(S, name="full_keys")
    call = lambda p: rf.dot_attention(
        tensor(q, batch, time, heads, feat),
        tensor(k, batch, full_keys, heads, feat),
        tensor(v, batch, full_keys, heads, ident),
        key_dim=feat,
        axis=full_keys,
        att_dropout=p,
        att_dropout_broadcast=broadcast,
    ).copy_compatible_to_dims_raw([batch, time, heads, ident])
    with setting("on", MODES["bf16"]):
        plain = call(0.0).double()
        torch.manual_seed(1)
        first = call(0.4).double()
        torch.manual_seed(1)
        again = call(0.4).double()
        rf.init_forward_step_run_ctx()
        evaluation = call(0.4).double()
    assert torch.equal(first, again) and torch.equal(evaluation, plain) and not torch.equal(first, plain)
    kept = first != 0
    assert torch.allclose(first[kept], plain[kept] / 0.6, rtol=1e-2)
    if broadcast:
        assert (kept.all((0, 1, 2)) | (~kept).all((0, 1, 2))).all()
    else:
        assert 0.5 < float(kept.double().mean()) < 0.7


def test_off_is_stock_bit_for_bit():
    results = []
    for setting_ in ("stock", "off"):
        with setting(setting_, MODES["bf16"]):
            leaves = [r.requires_grad_(True) for r in _qkv(torch.bfloat16)]
            out: Tensor = _dot(*leaves)
            out[inside(LENS)].sum().backward()
            results.append([out[inside(LENS)].detach(), *(x.grad for x in leaves)])
    assert all(torch.equal(stock, ours) for stock, ours in zip(*results))
