"""
``rf.upcast``: the helpers for user code, whatever the policy says.
"""

from __future__ import annotations
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import MODES, needs_native, seq_dim, setting, tensor, values
from returnn_upcast import upcast
from tolerances import assert_close, relative_error

B, T, V, D = 3, 13, 41, 16
LENS = [13, 6, 1]
batch, vocab, feat = Dim(B, name="batch"), Dim(V, name="vocab"), Dim(D, name="feat")
time = seq_dim("time", LENS, batch)
LOGITS = values(B, T, V, seed=1, std=4.0)
LABELS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
MODE_NAMES = ["bf16", "f16", "amp-bf16"]


def _labels():
    return rf.convert_to_tensor(LABELS, dims=(batch, time), sparse_dim=vocab)


def _logits(mode: str):
    return tensor(LOGITS.to(MODES[mode].low), batch, time, vocab)


@pytest.mark.parametrize(
    "dtype, out",
    [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64"), ("int32", "int32"), ("bool", "bool")],
)
def test_float32(dtype, out):
    x = tensor(torch.ones(B, dtype=getattr(torch, dtype)), batch)
    assert upcast.float32(x).dtype == out
    if dtype == out:
        assert upcast.float32(x) is x


@pytest.mark.parametrize("setting_name", ["stock", "off", "on"])
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_softmax_family(mode, setting_name):
    x = LOGITS.to(MODES[mode].low).double()
    expected = {"log_softmax": x.log_softmax(-1), "softmax": x.softmax(-1), "reduce_logsumexp": x.logsumexp(-1)}
    for name, reference in expected.items():
        with setting(setting_name, MODES[mode]):
            out = getattr(upcast, name)(_logits(mode), axis=vocab)
        assert out.dtype == "float32"
        assert_close(out.raw_tensor, reference, 1.05, what=name)
        with setting("off", MODES[mode]):
            stock = getattr(rf, name)(_logits(mode), axis=vocab).raw_tensor
        assert relative_error(stock, reference) > 1e-4


def test_masks():
    """over time, the padded frames don't count"""
    x = LOGITS.to(torch.bfloat16)
    with setting("stock"):
        out = (
            upcast.reduce_logsumexp(tensor(x, batch, time, vocab), axis=time).copy_transpose([batch, vocab]).raw_tensor
        )
        soft = upcast.softmax(tensor(x, batch, time, vocab), axis=time).copy_transpose([batch, time, vocab]).raw_tensor
    for b, n in enumerate(LENS):
        assert_close(out[b], x[b, :n].double().logsumexp(0), 1.05)
        assert_close(soft[b, :n], x[b, :n].double().softmax(0), 1.05)
        assert (soft[b, n:] == 0).all()


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_pipeline_gives_the_float32_loss(mode):
    """log_softmax, label smoothing, cross entropy: to 1e-6 of the float32 run"""

    def loss(log_softmax, logits):
        log_prob = log_softmax(logits, axis=vocab)
        log_prob = rf.label_smoothed_log_prob_gradient(log_prob, 0.1, axis=vocab)
        ce = rf.cross_entropy(target=_labels(), estimated=log_prob, estimated_type="log-probs", axis=vocab)
        return rf.reduce_mean(ce, axis=[batch, time]).raw_tensor

    x = LOGITS.to(MODES[mode].low)
    with setting("stock"):
        expected = loss(rf.log_softmax, tensor(x.float(), batch, time, vocab))
    with setting("on", MODES[mode]):
        ours = loss(rf.upcast.log_softmax, _logits(mode))
    with setting("off", MODES[mode]):
        stock = loss(rf.log_softmax, _logits(mode))
    assert ours.dtype == torch.float32
    assert relative_error(ours, expected.double()) < 1e-6 < relative_error(stock, expected.double())


@pytest.mark.parametrize("kind", ["logits", "log-probs", "probs"])
@pytest.mark.parametrize("setting_name", ["stock", "on"])
def test_cross_entropy(kind, setting_name):
    x = {"logits": LOGITS, "log-probs": LOGITS.log_softmax(-1), "probs": LOGITS.softmax(-1)}[kind].to(torch.bfloat16)
    x64 = x.double()
    log_probs = {"logits": x64.log_softmax(-1), "log-probs": x64, "probs": x64.log()}[kind]
    reference = -log_probs.gather(-1, LABELS[..., None])[..., 0]
    with setting(setting_name, MODES["amp-bf16"]):
        est = tensor(x, batch, time, vocab)
        out = upcast.cross_entropy(estimated=est, target=_labels(), axis=vocab, estimated_type=kind)
    assert out.dtype == "float32"
    assert_close(out.copy_compatible_to_dims_raw([batch, time]), reference, 1.05)


@pytest.mark.parametrize("setting_name", ["stock", "on"])
def test_ctc_loss(setting_name):
    targets = seq_dim("targets", [3, 2, 1], batch)
    labels = rf.convert_to_tensor(LABELS[:, :3].clamp(max=V - 2), dims=(batch, targets), sparse_dim=vocab)
    kwargs = dict(targets=labels, input_spatial_dim=time, targets_spatial_dim=targets, blank_index=V - 1)
    x = LOGITS.to(torch.float16)
    with setting(setting_name):
        out = upcast.ctc_loss(logits=tensor(x, batch, time, vocab, feature_dim=vocab), **kwargs)
        wide = rf.ctc_loss(logits=tensor(x.double(), batch, time, vocab, feature_dim=vocab), **kwargs)
    assert out.dtype == "float32"
    assert_close(out.raw_tensor, wide.raw_tensor, 1.05, float32=1e-6)


def _linear(mode: str, bias: bool = True):
    lin = rf.Linear(feat, vocab, with_bias=bias)
    for i, param in enumerate(lin.parameters()):
        param.raw_tensor.data.copy_(values(*param.raw_tensor.shape, seed=10 + i))
    return lin


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_linear(mode, bias):
    low = MODES[mode].low
    x = values(B, T, D, seed=3).to(low).requires_grad_(True)
    with setting("stock", MODES[mode]):
        lin = _linear(mode, bias)
        out = upcast.linear(lin, tensor(x, batch, time, feat))
        stock = lin(tensor(x, batch, time, feat)).raw_tensor
    # under autocast the operands are rounded to its dtype, as always
    reference = x.detach().double() @ lin.weight.raw_tensor.detach().to(low).double()
    if bias:
        reference = reference + lin.bias.raw_tensor.detach().double()
    assert out.dtype == "float32" and out.feature_dim == vocab and set(out.dims) == {batch, time, vocab}
    assert_close(out.raw_tensor, reference, 1.05, float32=1e-6)
    assert relative_error(stock, reference) > 1e-4
    out.raw_tensor.sum().backward()
    assert x.grad.dtype == low and lin.weight.raw_tensor.grad.dtype == lin.weight.raw_tensor.dtype


@needs_native
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_linear_cross_entropy(mode):
    low = MODES[mode].low
    x = values(B, T, D, seed=3).to(low)
    with setting("stock", MODES[mode]):
        lin = _linear(mode)
        kwargs = dict(target=_labels(), label_smoothing=0.1)
        out = upcast.linear_cross_entropy(lin, tensor(x, batch, time, feat), float32_logits=True, **kwargs)
        rounded = upcast.linear_cross_entropy(lin, tensor(x, batch, time, feat), **kwargs)
        logits = lin(tensor(x, batch, time, feat)).copy_compatible_to_dims_raw([batch, time, vocab]).detach().double()
    exact = x.double() @ lin.weight.raw_tensor.detach().to(low).double() + lin.bias.raw_tensor.detach().double()
    for result, logits_ in ((out, exact), (rounded, logits)):
        log_probs = logits_.log_softmax(-1)
        reference = -0.9 * log_probs.gather(-1, LABELS[..., None])[..., 0] - 0.1 * log_probs.mean(-1)
        assert result.dtype == "float32"
        assert_close(result.copy_compatible_to_dims_raw([batch, time]), reference, 1.05, float32=1e-6)


def test_packed():
    x = values(B, T, D, seed=3).to(torch.bfloat16)
    with setting("on", MODES["bf16"]):
        lin, padded = _linear("bf16"), tensor(x, batch, time, feat, feature_dim=feat)
        packed = rf.pack(padded, dims=[batch, time])
        calls = {
            "linear": lambda x_: upcast.linear(lin, x_),
            "log_softmax": lambda x_: upcast.log_softmax(x_, axis=feat),
            "over time": lambda x_: upcast.softmax(x_, axis=time),
            "logsumexp": lambda x_: upcast.reduce_logsumexp(x_, axis=feat),
            "linear_cross_entropy": lambda x_: upcast.linear_cross_entropy(lin, x_, target=_labels()),
        }
        for name, call in calls.items():
            expected, out = call(padded), rf.unpack(call(packed))
            out_raw = out.copy_compatible_to_dims_raw(expected.dims)
            mask = expected.get_sequence_mask_broadcast(time).expand_as(out_raw)
            assert torch.allclose(out_raw[mask], expected.raw_tensor[mask], rtol=1e-6, atol=1e-7), name


def test_region_and_decorator():
    seen = {}

    @upcast.in_float32
    def func(x, options, *, scale):
        """my docstring"""
        seen.update(
            x=x.dtype, y=options["y"][0].dtype, raw=options["raw"].dtype, n=options["n"].dtype, other=options["other"]
        )
        seen["matmul"] = rf.matmul(x, scale, reduce=vocab).dtype
        return x

    low = torch.bfloat16
    x = tensor(torch.ones(V, dtype=low), vocab)
    marker = object()
    with setting("stock", MODES["amp-bf16"]):
        assert rf.matmul(upcast.float32(x), upcast.float32(x), reduce=vocab).dtype == "bfloat16"
        options = {"y": [x], "raw": x.raw_tensor, "n": _labels(), "other": marker}
        out = func(x, options, scale=tensor(torch.ones(V), vocab))
        with upcast.region():
            assert rf.matmul(upcast.float32(x), upcast.float32(x), reduce=vocab).dtype == "float32"
        assert torch.is_autocast_enabled("cpu")
    assert seen == {
        "x": "float32",
        "y": "float32",
        "raw": torch.float32,
        "n": "int64",
        "other": marker,
        "matmul": "float32",
    }
    assert out.dtype == "float32" and func.__doc__ == "my docstring"
    assert options["y"][0] is x


def test_region_is_left_on_errors():
    with setting("stock", MODES["amp-bf16"]):
        with pytest.raises(KeyError), upcast.region():
            raise KeyError
        assert torch.is_autocast_enabled("cpu")


INT = lambda: rf.convert_to_tensor(LABELS, dims=(batch, time), sparse_dim=vocab)
BAD = {
    "integer": (lambda: upcast.log_softmax(INT(), axis=time), TypeError, "log_softmax.*int64"),
    "integer softmax": (lambda: upcast.softmax(INT(), axis=time), TypeError, "softmax.*int64"),
    "integer logsumexp": (lambda: upcast.reduce_logsumexp(INT(), axis=time), TypeError, "reduce_logsumexp.*int64"),
    "axis": (lambda: upcast.log_softmax(_logits("bf16"), axis=feat), ValueError, "log_softmax: axis .*feat"),
    "axis logsumexp": (lambda: upcast.reduce_logsumexp(_logits("bf16"), axis=[vocab, feat]), ValueError, "axis .*feat"),
    "axis ce": (
        lambda: upcast.cross_entropy(estimated=_logits("bf16"), target=INT(), axis=feat, estimated_type="logits"),
        ValueError,
        "cross_entropy: axis .*feat",
    ),
    "type ce": (
        lambda: upcast.cross_entropy(estimated=_logits("bf16"), target=INT(), axis=vocab, estimated_type="scores"),
        ValueError,
        "estimated_type.*'scores'",
    ),
    "no linear": (lambda: upcast.linear(rf.LayerNorm(vocab), _logits("bf16")), TypeError, "rf.Linear, got LayerNorm"),
    "linear dim": (lambda: upcast.linear(rf.Linear(feat, vocab), _logits("bf16")), ValueError, "linear: axis .*feat"),
    "target": (
        lambda: upcast.linear_cross_entropy(rf.Linear(vocab, feat), _logits("bf16"), target=INT()),
        ValueError,
        "target .* must be sparse over",
    ),
    "no tensor": (
        lambda: upcast.softmax(LOGITS, axis=vocab),
        TypeError,
        "softmax: expected a RETURNN Tensor, got torch.Tensor",
    ),
    "integer ctc": (
        lambda: upcast.ctc_loss(
            logits=INT(), targets=INT(), input_spatial_dim=time, targets_spatial_dim=time, blank_index=0
        ),
        TypeError,
        "ctc_loss.*int64",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_clear_error(name):
    call, error, message = BAD[name]
    with setting("on"), pytest.raises(error, match=message):
        call()
