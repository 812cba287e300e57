"""
Rotary position embedding: the rotation itself, and sin and cos inside the rotary attention classes.
"""

from __future__ import annotations
from typing import List, Tuple
import inspect
import itertools
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend._packed_backend import is_packed
from returnn.frontend.attention import _apply_rope
from returnn.tensor import Dim, single_step_dim
from common import MODES, Mode, seq_dim, setting, tensor, values
import references
from returnn_upcast.ops import rope
from tolerances import INPUT_GRAD, OUTPUT, assert_close, assert_within_one_rounding, relative_error, tolerance

LENS = (9, 6, 1)
batch, heads, key = Dim(3, name="batch"), Dim(2, name="heads"), Dim(8, name="key")
time = seq_dim("time", LENS, batch)
low_modes = pytest.mark.parametrize("mode", [MODES["bf16"], MODES["f16"]], ids=["bf16", "f16"])
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def angles(positions, dim: int = 8) -> torch.Tensor:
    """:return: float64 [len(positions), dim / 2]"""
    rates = torch.tensor([10_000 ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    return torch.tensor(list(positions), dtype=torch.float64)[:, None] * rates


@pytest.fixture(autouse=True)
def stock_does_not_compile(monkeypatch):
    """Stock RETURNN compiles its rotation, for seconds per combination of dtypes. Its plain code is what it falls to."""
    from returnn.torch.util import rope as stock_rope

    monkeypatch.setattr(stock_rope, "apply_rope", inspect.unwrap(stock_rope.apply_rope))


def rotate_as_is(x: torch.Tensor, enc: torch.Tensor) -> torch.Tensor:
    """:return: x [..., D] times (cos + i sin), where sin is the first half of enc, and need not belong to an angle"""
    sin, cos = enc.chunk(2, dim=-1)
    real, imag = x[..., 0::2], x[..., 1::2]
    return torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1).flatten(-2)


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("enc_dtype", DTYPES, ids=str)
@low_modes
def test_rotation_against_float64(mode: Mode, enc_dtype: torch.dtype, learned: bool):
    """Of an encoding as it is given: output, gradient, and the gradient of an encoding that is learned."""
    x, enc = values(3, 9, 2, 8, seed=1).to(mode.low).requires_grad_(), values(9, 8, seed=2).to(enc_dtype)
    enc.requires_grad_(learned)
    upstream = values(3, 9, 2, 8, seed=3).to(mode.low)
    x64, enc64 = x.detach().double().requires_grad_(), enc.detach().double().clone().requires_grad_()
    expected = rotate_as_is(x64, enc64[None, :, None])
    expected.backward(upstream.double())
    found = {}
    for name in ("off", "on"):
        x.grad = enc.grad = None
        with setting(name, mode):
            out = _apply_rope(tensor(x, batch, time, heads, key), tensor(enc, time, key), key)
            out.raw_tensor.backward(upstream.to(out.raw_tensor.dtype))
        found[name] = out.raw_tensor.detach(), x.grad, enc.grad
    assert out.dims == (batch, time, heads, key)
    assert_close(found["on"][0], expected.detach(), OUTPUT)
    assert_close(found["on"][1], x64.grad, INPUT_GRAD)
    if learned:
        assert_close(found["on"][2], enc64.grad, INPUT_GRAD, float32=1e-5)
    if enc_dtype == mode.low:
        assert relative_error(found["off"][0], expected.detach()) > tolerance(expected.detach(), mode.low, OUTPUT)
        assert relative_error(found["off"][1], x64.grad) > tolerance(x64.grad, mode.low, INPUT_GRAD)


def test_dtype_and_dims_of_stock():
    for x_dtype, enc_dtype in itertools.product(DTYPES, DTYPES):
        for perm in [(0, 1, 2, 3), (3, 0, 2, 1)]:
            dims = [(batch, time, heads, key)[i] for i in perm]
            raw = values(3, 9, 2, 8, seed=1).to(x_dtype).permute(perm)
            outs = []
            for name in ("stock", "on"):
                with setting(name):
                    enc = tensor(values(9, 8, seed=2).to(enc_dtype), time, key)
                    outs.append(_apply_rope(tensor(raw, *dims), enc, key))
            stock, upcast = outs
            assert upcast.dtype == stock.dtype and upcast.raw_tensor.dtype == stock.raw_tensor.dtype
            assert upcast.dims == stock.dims and upcast.feature_dim == stock.feature_dim
            if x_dtype.itemsize >= 4:
                assert torch.equal(upcast.raw_tensor, stock.raw_tensor)


def test_dtype_of_the_rotary_classes_is_that_of_stock():
    frames = Dim(6, name="frames")
    for mode in (Mode(torch.bfloat16), Mode(torch.float16), Mode(torch.float32), MODES["amp-bf16"]):
        for version in (24, 38):
            dtypes = []
            for name in ("stock", "on"):
                with setting(name, mode, version=version):
                    module, width = _module(rf.RotaryPosSelfAttention)
                    x = tensor(values(6, 16, seed=1).to(mode.param_dtype), frames, width)
                    got = []
                    module.attention = lambda q, k, v, kv_axis, got=got: got.append((q.dtype, k.dtype, v.dtype)) or v
                    module(x, axis=frames)
                dtypes.append(got)
            assert dtypes[0] == dtypes[1], (mode, version)


@low_modes
@pytest.mark.parametrize("gap", [0, 2])
def test_packed_as_padded(mode: Mode, gap: int):
    raw = values(3, 9, 2, 8, seed=1).to(mode.low)
    mask = torch.arange(9)[None] < torch.tensor(LENS)[:, None]
    results = []
    for packed in (False, True):
        x = raw.clone().requires_grad_()
        with setting("on", mode):
            source = tensor(x, batch, time, heads, key)
            enc = rf.sinusoidal_positional_encoding(spatial_dim=time, feat_dim=key, offset=5000)
            out = _apply_rope(rf.pack(source, dims=(batch, time), gap=gap) if packed else source, enc, key)
            assert is_packed(out) == packed
            out = rf.unpack(out) if packed else out
            result = out.copy_compatible_to_dims_raw([batch, time, heads, key])
            (result[mask] * values(16, 2, 8, seed=3).to(mode.low)).sum().backward()
        results.append((result[mask], x.grad[mask]))
    for a, b in zip(*results):
        assert_within_one_rounding(a, b)


@pytest.fixture
def rotations(monkeypatch) -> List[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """:return: x, encoding and result of every rotation that follows"""
    result = []
    original = rope.apply_rope

    def record(x, pos_enc, **kwargs):
        result.append((x.detach(), pos_enc, original(x, pos_enc, **kwargs)))
        return result[-1][2]

    monkeypatch.setattr(rope, "apply_rope", record)
    return result


def check_rotations(rotations, mode: Mode, positions):
    """q and k of each call, in order: rotated by their positions, rounded once"""
    assert len(rotations) == len(positions)
    for (x, pos_enc, out), where in zip(rotations, positions):
        assert pos_enc.dtype == torch.float32 and out.dtype == mode.low
        expected = references.rotate(x.double(), angles(where).view(*pos_enc.shape[:-1], -1))
        assert_close(out, expected, OUTPUT)
    rotations.clear()


def _module(cls):
    width = Dim(16, name="width")
    torch.manual_seed(1)
    kwargs = dict(proj_dim=width, key_dim_total=Dim(16, name="k"), value_dim_total=Dim(16, name="v"), num_heads=2)
    return cls(width, att_dropout=0.0, **kwargs), width


@low_modes
def test_rotary_self_attention(mode: Mode):
    frames = Dim(600, name="frames")
    for name in ("off", "on"):
        with setting(name, mode):
            module, width = _module(rf.RotaryPosSelfAttention)
            x = tensor(values(600, 16, seed=1).to(mode.low), frames, width)
            before, after = module.forward_qkv(x), []
            module.attention = lambda *qkv, kv_axis, after=after: after.extend(qkv) or qkv[2]
            module(x, axis=frames)
        for i in range(2):
            q, rotated = (v.raw_tensor.movedim(0, -2).detach() for v in (before[i], after[i]))
            assert rotated.dtype == mode.low
            expected = references.rotate(q.double(), angles(range(600)))
            assert (relative_error(rotated, expected) <= tolerance(expected, mode.low, OUTPUT)) == (name == "on")


@pytest.mark.parametrize("first", ["rotary", "plain"])
@low_modes
def test_rotary_and_plain_encoding_in_one_cache(mode: Mode, first: str):
    """Sin and cos are float32 inside the rotary classes, the same encoding is of the default dtype outside."""
    frames = Dim(77 if first == "rotary" else 78, name="frames")
    with setting("on", mode):
        module, width = _module(rf.RotaryPosSelfAttention)
        key_dim, base = module.key_dim_per_head, 10_000 ** (1 - 2 / 8)
        calls = {
            "rotary": lambda: module(
                tensor(values(frames.dimension, 16, seed=1).to(mode.low), frames, width), axis=frames
            ),
            "plain": lambda: rf.sinusoidal_positional_encoding(spatial_dim=frames, feat_dim=key_dim, base=base),
        }
        for name in (first, *calls, first):
            assert calls[name]().raw_tensor.dtype == mode.low


@low_modes
def test_rotary_causal_self_attention_with_state(mode: Mode, rotations):
    """A sequence from scratch, a chunk on top of its state, then single steps: positions go on counting."""
    first, second = Dim(300, name="first"), Dim(5, name="second")
    x = values(310, 16, seed=1).to(mode.low)
    with setting("on", mode):
        module, width = _module(rf.RotaryPosCausalSelfAttention)
        out, state = module(tensor(x[:300], first, width), axis=first)
        assert out.raw_tensor.dtype == mode.low
        check_rotations(rotations, mode, [range(300)] * 2)
        for position in range(300, 303):
            out, state = module(tensor(x[position], width), axis=single_step_dim, state=state)
            assert out.dims == (width,) and out.raw_tensor.dtype == mode.low
            check_rotations(rotations, mode, [[position], range(position + 1)])
        out, state = module(tensor(x[303:308], second, width), axis=second, state=state)
        assert out.raw_tensor.dtype == mode.low
        check_rotations(rotations, mode, [range(303, 308), range(308)])
