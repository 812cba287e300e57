"""
The attention classes: against float64 and stock, by single steps, packed, and in wide dtypes.
"""

from __future__ import annotations
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend.attention import CausalSelfAttentionState
from returnn.tensor import Dim, single_step_dim
from attention_cases import LENS, B, H, K, T, batch, time
from common import MODES, inside, name_of, setting, tensor, values
from tolerances import relative_error

model = Dim(H * K, name="model")
CLASSES = {
    "SelfAttention": rf.SelfAttention,
    "CausalSelfAttention": rf.CausalSelfAttention,
    "RotaryPosSelfAttention": rf.RotaryPosSelfAttention,
    "RotaryPosCausalSelfAttention": rf.RotaryPosCausalSelfAttention,
    "RelPosSelfAttention": rf.RelPosSelfAttention,
    "RelPosCausalSelfAttention": rf.RelPosCausalSelfAttention,
}

pytestmark = [
    pytest.mark.usefixtures("attention_path"),
    pytest.mark.parametrize("attention_path", ["native"], indirect=True),  # test_attention.py has the other one as well
]


def _module(cls, dtype, **kwargs):
    with rf.set_default_float_dtype_ctx(dtype):
        module = cls(model, model, key_dim_total=model, value_dim_total=model, num_heads=H, att_dropout=0.0, **kwargs)
    for i, param in enumerate(module.parameters()):
        # exact in bf16, so that all dtypes have the same parameters
        raw = values(*param.raw_tensor.shape, seed=20 + i, std=0.4 if param.raw_tensor.ndim > 1 else 0.1)
        param.raw_tensor.data.copy_(raw.to(torch.bfloat16))
    return module


def _out(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("mode", ["bf16", "amp-bf16"])
@pytest.mark.parametrize("name", CLASSES)
def test_classes(name, mode):
    """no further from float64 than stock, in the dtype of stock"""
    mode = MODES[mode]
    x = values(B, T, H * K, seed=3).to(torch.bfloat16)
    mask, errors, dtypes = inside(LENS), {}, {}
    with setting("stock", dtype=torch.float64):
        wide = _module(CLASSES[name], "float64")
        reference = _out(wide(tensor(x.double(), batch, time, model), axis=time))
        reference = reference.copy_compatible_to_dims_raw([batch, time, model])[mask].detach()
    for setting_ in ("off", "on"):
        with setting(setting_, mode):
            module = _module(CLASSES[name], name_of(mode.param_dtype))
            out = _out(module(tensor(x, batch, time, model), axis=time))
        raw = out.copy_compatible_to_dims_raw([batch, time, model])[mask]
        errors[setting_], dtypes[setting_] = relative_error(raw, reference), out.dtype
    assert dtypes["on"] == dtypes["off"]
    assert errors["on"] < 1.01 * errors["off"], errors  # the projections are most of it


@pytest.mark.parametrize("name", [n for n in CLASSES if "Causal" in n])
@pytest.mark.parametrize("mode", ["bf16", "amp-bf16"])
def test_single_steps_are_the_full_sequence(name, mode):
    x = values(B, T, H * K, seed=3).to(torch.bfloat16)
    full_time = Dim(T, name="full_time")
    with setting("on", MODES[mode]), torch.no_grad():
        module = _module(CLASSES[name], name_of(MODES[mode].param_dtype))
        full = _out(module(tensor(x, batch, full_time, model), axis=full_time))
        full = full.copy_compatible_to_dims_raw([batch, full_time, model]).double()
        state: CausalSelfAttentionState = module.default_initial_state(batch_dims=[batch])
        steps = []
        for t in range(T):
            out, state = module(tensor(x[:, t], batch, model), axis=single_step_dim, state=state)
            steps.append(out.copy_compatible_to_dims_raw([batch, model]))
    # both are rounded at the same places, so they differ by single roundings that go the other way
    assert relative_error(torch.stack(steps, 1), full) < 2.0**-8


@pytest.mark.parametrize("name", CLASSES)
def test_packed_is_padded(name):
    from returnn.frontend import _packed_backend

    allow = getattr(_packed_backend, "set_allowed_fallbacks", lambda ops: None)  # not in all releases
    allow(True)
    x = tensor(values(B, T, H * K, seed=3).to(torch.bfloat16), batch, time, model)
    with setting("on", MODES["bf16"]), torch.no_grad():
        module = _module(CLASSES[name], "bfloat16")
        padded = _out(module(x, axis=time)).copy_compatible_to_dims_raw([batch, time, model])
        packed = rf.unpack(_out(module(rf.pack(x, dims=[batch, time]), axis=time)))
        packed = packed.copy_compatible_to_dims_raw([batch, time, model])
    allow(None)
    mask = inside(LENS)
    assert relative_error(packed[mask], padded[mask].double()) < 2.0**-7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CLASSES)
def test_wide_inputs_are_stock_bit_for_bit(name, dtype):
    results = []
    for setting_ in ("stock", "on"):
        with setting(setting_, dtype=getattr(torch, dtype)):
            module = _module(CLASSES[name], dtype)
            x = values(B, T, H * K, seed=3).to(getattr(torch, dtype)).requires_grad_(True)
            out = _out(module(tensor(x, batch, time, model), axis=time)).copy_compatible_to_dims_raw(
                [batch, time, model]
            )
            out[inside(LENS)].sum().backward()
            results.append([out.detach()[inside(LENS)], x.grad, *(p.raw_tensor.grad for p in module.parameters())])
    for stock, ours in zip(*results):
        assert (stock is None and ours is None) or torch.equal(stock, ours)
