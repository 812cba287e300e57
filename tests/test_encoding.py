"""
Positional encodings: right at any position, in the dtypes of stock RETURNN, and kept apart from stock ones in the cache.
"""

from __future__ import annotations
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend import attention
from returnn.frontend.decoder.transformer import TransformerDecoder
from returnn.frontend.encoder.transformer import TransformerEncoder
from returnn.tensor import Dim, single_step_dim
import returnn_upcast
from common import MODES, Mode, setting, tensor
import references
from tolerances import OUTPUT, assert_close, relative_error, tolerance

feat = Dim(8, name="feat")
FLOAT32, FLOAT64 = Mode(torch.float32), Mode(torch.float64)
low_modes = pytest.mark.parametrize("mode", [MODES["bf16"], MODES["f16"]], ids=["bf16", "f16"])
STARTS = (0, 250, 2040, 65_530, 99_980)


def sinusoidal(start: int = 0, num: int = 20, **kwargs) -> torch.Tensor:
    """:return: [num, feat]"""
    spatial = Dim(num, name="spatial")
    out = rf.sinusoidal_positional_encoding(spatial_dim=spatial, feat_dim=feat, offset=start, **kwargs)
    assert out.dims == (spatial, feat) and out.feature_dim == feat
    return out.raw_tensor


def relative(queries: int, keys: int, offset: int = 0, **kwargs) -> torch.Tensor:
    """:return: [queries + keys - 1, feat]"""
    out, dim = rf.relative_positional_encoding(
        query_spatial_dim=Dim(queries, name="queries"), key_value_spatial_dim=Dim(keys, name="keys"), feat_dim=feat,
        query_offset=offset, **kwargs,
    )  # fmt: skip
    assert out.dims == (dim, feat) and out.feature_dim == feat
    return out.raw_tensor


@low_modes
@pytest.mark.parametrize("base", [1e4, 10_000 ** (1 - 2 / 8), 500])
def test_sinusoidal(mode: Mode, base: float):
    for start in STARTS:
        expected = references.sinusoidal(range(start, start + 20), 8, base=base)
        with setting("on", mode):
            found = sinusoidal(start, base=base)
        assert found.dtype == mode.low
        assert_close(found, expected, OUTPUT, what=str(start))
        with setting("off", mode):
            assert relative_error(sinusoidal(start, base=base), expected) > tolerance(expected, mode.low, OUTPUT)


@low_modes
def test_relative(mode: Mode):
    for queries, keys, offset in [(7, 7, 0), (3, 5, 0), (300, 280, 0), (5, 4, -99_990), (1, 1, 0)]:
        expected = references.relative(queries, keys, 8, offset=offset)
        with setting("on", mode):
            found = relative(queries, keys, offset)
        assert found.dtype == mode.low
        assert_close(found, expected, OUTPUT, what=str((queries, keys, offset)))
        if max(queries, abs(offset)) > 1:
            with setting("off", mode):
                stock = relative(queries, keys, offset)
            assert relative_error(stock, expected) > tolerance(expected, mode.low, OUTPUT)


@low_modes
def test_known_values(mode: Mode):
    """Feature 0 is sin(position): stock bf16 gives -1, -1, 0.3789, and -0.3125 twice."""
    for start, expected in [(256, [-0.9992, -0.5734, 0.3796]), (2048, [-0.3131, 0.6300])]:
        with setting("on", mode):
            found = sinusoidal(start, len(expected))[:, 0].double()
        assert torch.allclose(found, torch.tensor(expected).double(), rtol=torch.finfo(mode.low).eps / 2, atol=5e-5)


@low_modes
def test_explicit_dtype_and_indices(mode: Mode):
    """The dtype of the call counts, not the default; and ``sinusoidal_encoding`` itself can be called."""
    name = str(mode.low).split(".")[1]
    batch, expected = Dim(3, name="batch"), references.sinusoidal([99_999, 3, 257], 8)
    with setting("on", FLOAT32):
        found = rf.sinusoidal_encoding(tensor(torch.tensor([99_999, 3, 257]), batch), feat_dim=feat, dtype=name)
        assert found.dims == (batch, feat) and found.feature_dim == feat
        for raw, right in [
            (found.raw_tensor, expected),
            (sinusoidal(5000, dtype=name), references.sinusoidal(range(5000, 5020), 8)),
            (relative(300, 4, dtype=name), references.relative(300, 4, 8)),
        ]:
            assert raw.dtype == mode.low
            assert_close(raw, right, OUTPUT)


@low_modes
def test_offset_tensor_and_single_step(mode: Mode):
    """As :class:`rf.TransformerDecoder` calls it."""
    with setting("on", mode):
        step = rf.sinusoidal_positional_encoding(
            spatial_dim=single_step_dim, feat_dim=feat, offset=tensor(torch.tensor(99_999))
        )
    assert step.dims == (feat,)
    assert step.raw_tensor.dtype == mode.low
    assert_close(step.raw_tensor, references.sinusoidal([99_999], 8)[0], OUTPUT)


@pytest.mark.parametrize("mode", [FLOAT32, FLOAT64, MODES["amp-bf16"]], ids=["float32", "float64", "amp"])
def test_wide_encodings_are_stock_bit_for_bit(mode: Mode):
    calls = [lambda: sinusoidal(3000), lambda: relative(300, 280), lambda: relative(2, 3, 10_000)]
    with setting("stock", mode):
        expected = [call() for call in calls]
    with setting("on", mode):
        assert all(torch.equal(call(), value) for call, value in zip(calls, expected))


@pytest.mark.parametrize("first", [False, True], ids=["stock first", "upcast first"])
@pytest.mark.parametrize("call", [lambda: sinusoidal(500), lambda: relative(400, 3)], ids=["sinusoidal", "relative"])
@low_modes
def test_cache_does_not_leak(mode: Mode, call, first: bool):
    with setting("stock", mode):
        stock = call()
        for cache in (attention._sinusoidal_positional_encoding_cache, attention._relative_positional_encoding_cache):
            cache._lru_cache.cache_clear()
    with setting("on", mode):
        for on in (first, not first, first):
            with returnn_upcast.scope(on):
                assert torch.equal(call(), stock) != on
                assert torch.equal(call(), stock) != on
    with setting("stock", mode):
        assert torch.equal(call(), stock)


@low_modes
def test_cache_is_used(mode: Mode):
    with setting("on", mode):
        assert sinusoidal(77) is sinusoidal(77)


@low_modes
def test_models_that_were_built_before(mode: Mode):
    """Transformers hold the function itself, as default argument; so does a model from before ``install()``."""
    vocab, width, frames = Dim(5, name="vocab"), Dim(8, name="width"), Dim(600, name="frames")
    options = dict(vocab_dim=vocab, model_dim=width, num_layers=0, num_heads=2)
    with setting("stock", mode):
        models = [TransformerDecoder(None, **options), TransformerEncoder(**options)]
    expected = references.sinusoidal(range(600), 8)
    for name in ("off", "on"):
        with setting(name, mode):
            for model in models:
                found = model.pos_enc(spatial_dim=frames).raw_tensor
                assert found.dtype == mode.low
                assert (relative_error(found, expected) <= tolerance(expected, mode.low, OUTPUT)) == (name == "on")


def test_rel_pos_self_attention_gets_the_right_encoding(monkeypatch):
    mode, width, frames = MODES["bf16"], Dim(8, name="width"), Dim(300, name="frames")
    with setting("on", mode):
        module = rf.RelPosSelfAttention(
            width, proj_dim=width, key_dim_total=width, value_dim_total=width, num_heads=2, att_dropout=0.0
        )
        got = []
        linear = module.linear_pos
        module.linear_pos = lambda pos_emb: (got.append(pos_emb), linear(pos_emb))[1]
        module(tensor(torch.randn(300, 8).to(mode.low), frames, width), axis=frames)
    assert got[0].dtype == "bfloat16"
    assert_close(got[0].raw_tensor, references.relative(300, 300, 8), OUTPUT)
