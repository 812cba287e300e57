"""
What RETURNN's frontend does around the ops: stopped gradients, recurrent layers, search by single steps.
"""

from __future__ import annotations
from typing import Callable, Dict, Tuple
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend.decoder.transformer import TransformerDecoder
from returnn.tensor import Dim, single_step_dim
from common import MODES, seq_dim, set_parameters, setting, tensor, values
from engine_fixtures import plain_ops  # noqa: F401, an autouse fixture
from tolerances import relative_error

batch, feat, vocab = Dim(3, name="batch"), Dim(16, name="feat"), Dim(11, name="vocab")
time, label_time = seq_dim("time", (7, 5, 6), batch), seq_dim("label_time", (2, 1, 2), batch)
labels = values(3, 2, seed=9).abs().mul(3).int() + 1


# Stopped gradients.


def _attention(x: rf.Tensor) -> rf.Tensor:
    keys, _ = rf.replace_dim(x, in_dim=time, out_dim=seq_dim("keys", (7, 5, 6), batch))
    return rf.dot_attention(x, keys, keys, key_dim=feat, axis=keys.dims[1], att_dropout=0.0)


def _ctc(x: rf.Tensor) -> rf.Tensor:
    targets = rf.convert_to_tensor(labels, dims=[batch, label_time], sparse_dim=feat)
    return rf.ctc_loss(logits=x, targets=targets, input_spatial_dim=time, targets_spatial_dim=label_time, blank_index=0)


def _cross_entropy(x: rf.Tensor) -> rf.Tensor:
    targets = rf.convert_to_tensor(torch.ones(3, 7, dtype=torch.int32), dims=[batch, time], sparse_dim=feat)
    return rf.cross_entropy(estimated=x, target=targets, axis=feat, estimated_type="logits")


# of x [batch, time, feat]; the modules are made at the call
COVERED: Dict[str, Callable[[rf.Tensor], rf.Tensor]] = {
    "layer_norm": lambda x: rf.LayerNorm(feat)(x),
    "rms_norm": lambda x: rf.RMSNorm(feat)(x),
    "group_norm": lambda x: rf.GroupNorm(feat, num_groups=4)(x),
    "batch_norm": lambda x: rf.BatchNorm(feat, use_mask=True)(x),
    "normalize": lambda x: rf.normalize(x, axis=feat),
    "attention": _attention,
    "rope": lambda x: rf.RotaryPosSelfAttention(
        feat, feat, key_dim_total=feat, value_dim_total=feat, num_heads=2, att_dropout=0.0
    )(x, axis=time),
    "cross_entropy": _cross_entropy,
    "ctc_loss": _ctc,
    "upcast.log_softmax": lambda x: rf.upcast.log_softmax(x, axis=feat),
}


@pytest.mark.parametrize("name", COVERED)
def test_stop_gradient_scope(name: str):
    """Nothing made within the scope has a gradient, and the same outside has one."""
    with setting("on", MODES["bf16"]):
        raw = values(3, 7, 16, seed=1).bfloat16().requires_grad_()
        x = tensor(raw, batch, time, feat, feature_dim=feat)

        def call() -> rf.Tensor:
            rf.set_random_seed(1)  # the parameters
            return COVERED[name](x)

        with rf.stop_gradient_scope():
            stopped = call()
        stopped_by_op = rf.stop_gradient(call())
        open_ = call()
    assert not stopped.raw_tensor.requires_grad and not stopped_by_op.raw_tensor.requires_grad
    assert stopped.raw_tensor.grad_fn is None and torch.equal(stopped.raw_tensor, open_.raw_tensor)
    (open_.raw_tensor.float().sum() + stopped.raw_tensor.float().sum()).backward()
    assert raw.grad is not None and raw.grad.abs().max() > 0


# Recurrent layers beside the ops.


@pytest.mark.parametrize("mode", ["bf16", "amp-bf16"])
def test_lstm_beside(mode: str):
    """The policy changes the norm and nothing of the LSTM, in inference over a sequence and by single steps."""
    results = {}
    for name in ("stock", "on"):
        with setting(name, MODES[mode]), torch.no_grad():
            rf.init_forward_step_run_ctx()
            lstm, norm = rf.LSTM(feat, feat), rf.RMSNorm(feat)
            params = {
                n: values(*p.raw_tensor.shape, seed=i, std=0.3) for i, (n, p) in enumerate(lstm.named_parameters())
            }
            set_parameters(lstm, params)
            x = tensor(values(3, 7, 16, seed=1).to(MODES[mode].param_dtype), batch, time, feat, feature_dim=feat)
            out, state = lstm(x, state=lstm.default_initial_state(batch_dims=[batch]), spatial_dim=time)
            step = tensor(x.copy_compatible_to_dims_raw([batch, time, feat])[:, 0], batch, feat, feature_dim=feat)
            single, _ = lstm(step, state=state, spatial_dim=single_step_dim)
            low = rf.cast(out, "bfloat16")
            results[name] = [t.raw_tensor.clone() for t in (out, state.h, state.c, single, norm(low))]
    for stock, on in zip(results["stock"][:-1], results["on"][:-1]):
        assert stock.dtype == on.dtype and torch.equal(stock, on)
    assert not torch.equal(results["stock"][-1], results["on"][-1])


# Search: a prompt, then single steps with the state.

SELF_ATT = {
    "sinusoidal": {},
    "rotary": {"pos_enc": None, "layer_opts": {"self_att": rf.RotaryPosCausalSelfAttention}},
    "rel_pos": {"pos_enc": None, "layer_opts": {"self_att": rf.RelPosCausalSelfAttention}},
}
PROMPT, STEPS = 300, 8  # the last positions are not representable in bf16


def _decoder(kind: str, dtype: torch.dtype) -> rf.Module:
    opts = {"num_layers": 2, "num_heads": 2, "dropout": 0.0, "att_dropout": 0.0, **SELF_ATT[kind]}
    with rf.set_default_float_dtype_ctx(str(dtype).split(".")[1]):
        decoder = TransformerDecoder(None, vocab, feat, ff_dim=Dim(32, name="ff"), **opts)
    for i, (name, param) in enumerate(decoder.named_parameters()):
        raw = values(*param.raw_tensor.shape, seed=20 + i, std=0.3, mean=1.0 if name.endswith("scale") else 0.0)
        # exact in all dtypes, so that all have the same parameters
        param.raw_tensor.data.copy_(raw.to(torch.bfloat16))
    return decoder


@torch.no_grad()
def _search(kind: str, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
    """:return: logits [batch, step, vocab] of the last positions: all at once, by single steps"""
    rf.init_forward_step_run_ctx()
    decoder = _decoder(kind, dtype)
    label = torch.randint(0, 11, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    sparse = lambda raw, *dims: rf.convert_to_tensor(raw, dims=[batch, *dims], sparse_dim=vocab)
    full_dim, prompt_dim = Dim(PROMPT + STEPS, name="full"), Dim(PROMPT, name="prompt")
    initial = lambda: decoder.default_initial_state(batch_dims=[batch])
    full, _ = decoder(sparse(label, full_dim), spatial_dim=full_dim, state=initial())
    _, state = decoder(sparse(label[:, :PROMPT], prompt_dim), spatial_dim=prompt_dim, state=initial())
    steps = []
    for pos in range(PROMPT, PROMPT + STEPS):
        logits, state = decoder(sparse(label[:, pos]), spatial_dim=single_step_dim, state=state)
        assert logits.dtype == str(dtype).split(".")[1]
        steps.append(logits.copy_compatible_to_dims_raw([batch, vocab]))
    full = full.copy_compatible_to_dims_raw([batch, full_dim, vocab])[:, PROMPT:]
    return full.double(), torch.stack(steps, 1).double()


@pytest.mark.parametrize("kind", SELF_ATT)
@pytest.mark.parametrize("mode", ["bf16", "f16"])
def test_single_steps_of_search(mode: str, kind: str):
    """Single steps differ from the full sequence by no more than that does from float64, and stock is further from it."""
    dtype, errors = MODES[mode].low, {}
    with setting("stock", dtype=torch.float64):
        reference, reference_steps = _search(kind, torch.float64)
    assert relative_error(reference_steps, reference) < 1e-10
    for name in ("stock", "on"):
        with setting(name, MODES[mode]):
            full, steps = _search(kind, dtype)
        errors[name] = relative_error(full, reference), relative_error(steps, reference), relative_error(steps, full)
    full, steps, difference = errors["on"]
    assert difference <= full and steps <= 1.1 * full, errors
    assert steps < 0.75 * errors["stock"][1], errors
