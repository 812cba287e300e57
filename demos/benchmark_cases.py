"""
The cases of ``demo-benchmark.py``: norms, attention, losses and whole training steps.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List, Sequence, Tuple
import torch
import returnn.frontend as rf
from returnn.frontend.decoder.transformer import FeedForwardGated, TransformerDecoder
from returnn.frontend.encoder.conformer import ConformerEncoder
from returnn.tensor import Dim, Tensor
import returnn_upcast

# what a case gives: a function that computes a raw result, and the leaves that get gradients
Case = Tuple[Callable[[], torch.Tensor], List[torch.Tensor]]


class Maker:
    """Makes tensors, dims and modules of one device and dtype."""

    def __init__(self, device: str, low: torch.dtype):
        self.device, self.low = device, low

    def leaf(self, *shape: int) -> torch.Tensor:
        """:return: random low-precision leaf"""
        return torch.randn(*shape, device=self.device).to(self.low).requires_grad_(True)

    def labels(self, num: int, *shape: int) -> torch.Tensor:
        """:return: random labels"""
        return torch.randint(0, num, shape, device=self.device)

    def module(self, cls: Callable, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> rf.Module:
        """:return: cls(*args, **kwargs) with parameters of that dtype on the device"""
        name = str(dtype).split(".")[1]
        with rf.set_default_float_dtype_ctx(name), rf.set_default_device_ctx(self.device):
            return cls(*args, **kwargs)


def tensor(raw: torch.Tensor, *dims: Dim, **kwargs: Any) -> Tensor:
    """:return: raw as RETURNN's tensor"""
    return rf.convert_to_tensor(raw, dims=dims, **kwargs)


def seq_dim(name: str, lens: Sequence[int], batch: Dim) -> Dim:
    """:return: dim with these lengths"""
    return Dim(Tensor(name, [batch], dtype="int32", raw_tensor=torch.tensor(lens, dtype=torch.int32)), name=name)


def params(*modules: rf.Module) -> List[torch.Tensor]:
    """:return: raw trainable parameters"""
    return [p.raw_tensor for m in modules for p in m.parameters() if not p.auxiliary]


def norm(cls: Callable, low_params: bool = False, **kwargs: Any) -> Callable[[Maker], Case]:
    """:return: case of a norm over [16, 300, 512]"""

    def build(make: Maker) -> Case:
        batch, feat = Dim(16, name="batch"), Dim(512, name="feat")
        spatial = seq_dim("time", [300] + [150 + 10 * i for i in range(15)], batch)
        module = make.module(cls, feat, dtype=make.low if low_params else torch.float32, **kwargs)
        x = make.leaf(16, 300, 512)
        return lambda: module(tensor(x, batch, spatial, feat)).raw_tensor, [x, *params(module)]

    return build


def attention(causal: bool = False, dropout: float = 0.0) -> Callable[[Maker], Case]:
    """:return: case of dot attention, [8, 400, 8, 64]"""

    def build(make: Maker) -> Case:
        batch, heads, feat = Dim(8, name="batch"), Dim(8, name="heads"), Dim(64, name="feat")
        lens = [400, 380, 350, 300, 250, 200, 150, 100]
        queries = seq_dim("queries", lens, batch)
        keys = queries if causal else seq_dim("keys", lens, batch)
        q, k, v = (make.leaf(8, 400, 8, 64) for _ in range(3))
        extra = {"causal_query_spatial_dim": queries} if causal else {}

        def call() -> torch.Tensor:
            k_, v_ = (tensor(x, batch, keys, heads, feat) for x in (k, v))
            q_ = tensor(q, batch, queries, heads, feat)
            return rf.dot_attention(q_, k_, v_, key_dim=feat, axis=keys, att_dropout=dropout, **extra).raw_tensor

        return call, [q, k, v]

    return build


def rel_pos_attention(make: Maker) -> Case:
    """:return: case of a self-attention module with relative positions, AMP"""
    batch, feat = Dim(8, name="batch"), Dim(512, name="feat")
    spatial = seq_dim("time", [400, 380, 350, 300, 250, 200, 150, 100], batch)
    kwargs = dict(key_dim_total=feat, value_dim_total=feat, num_heads=8, att_dropout=0.1)
    module = make.module(rf.RelPosSelfAttention, feat, feat, **kwargs)
    x = make.leaf(8, 400, 512)
    return autocast(make, lambda: module(tensor(x, batch, spatial, feat), axis=spatial)), [x, *params(module)]


def autocast(make: Maker, func: Callable[[], Tensor]) -> Callable[[], torch.Tensor]:
    """:return: raw result of func under autocast"""

    def call() -> torch.Tensor:
        with torch.autocast(make.device, dtype=make.low):
            return func().raw_tensor

    return call


def cross_entropy(make: Maker) -> Case:
    """:return: case of 800 rows of 10,000 labels"""
    batch, frames, vocab = Dim(8, name="batch"), Dim(100, name="time"), Dim(10_000, name="vocab")
    x, labels = make.leaf(8, 100, 10_000), make.labels(10_000, 8, 100)

    def call() -> torch.Tensor:
        target = tensor(labels, batch, frames, sparse_dim=vocab)
        logits = tensor(x, batch, frames, vocab)
        return rf.cross_entropy(estimated=logits, target=target, axis=vocab, estimated_type="logits").raw_tensor

    return call, [x]


def linear_cross_entropy(make: Maker) -> Case:
    """:return: case of a projection to 50,000 labels with the loss"""
    batch, frames, feat, vocab = (Dim(n, name=name) for n, name in [(8, "b"), (100, "t"), (512, "f"), (50_000, "v")])
    module = make.module(rf.Linear, feat, vocab, dtype=make.low)
    x, labels = make.leaf(8, 100, 512), make.labels(50_000, 8, 100)

    def call() -> torch.Tensor:
        x_, target = tensor(x, batch, frames, feat, feature_dim=feat), tensor(labels, batch, frames, sparse_dim=vocab)
        if returnn_upcast.get_policy():
            return rf.upcast.linear_cross_entropy(module, x_, target=target).raw_tensor
        return rf.cross_entropy(estimated=module(x_), target=target, axis=vocab, estimated_type="logits").raw_tensor

    return call, [x, *params(module)]


def ctc_of(make: Maker, frames: Dim, batch: Dim, vocab: Dim) -> Callable[[Tensor, Dim], Tensor]:
    """:return: CTC loss of logits and their spatial dim, with random labels"""
    spatial = seq_dim("labels", [30] * batch.dimension, batch)
    labels = make.labels(vocab.dimension - 1, batch.dimension, 30)

    def loss(logits: Tensor, in_spatial: Dim) -> Tensor:
        targets = tensor(labels, batch, spatial, sparse_dim=vocab)
        dims = dict(input_spatial_dim=in_spatial, targets_spatial_dim=spatial)
        return rf.ctc_loss(logits=logits, targets=targets, blank_index=vocab.dimension - 1, **dims)

    return loss


def ctc(make: Maker) -> Case:
    """:return: case of CTC over 1,025 labels"""
    batch, vocab = Dim(8, name="batch"), Dim(1025, name="vocab")
    spatial = seq_dim("time", [250, 240, 230, 220, 210, 200, 190, 180], batch)
    x, loss = make.leaf(8, 250, 1025), ctc_of(make, spatial, batch, vocab)
    return lambda: loss(tensor(x, batch, spatial, vocab, feature_dim=vocab), spatial).raw_tensor, [x]


def conformer(make: Maker) -> Case:
    """:return: case of a training step of a Conformer with CTC, AMP"""
    batch, feat, vocab = Dim(8, name="batch"), Dim(512, name="feat"), Dim(1025, name="vocab")
    spatial = seq_dim("time", [300, 290, 280, 250, 240, 200, 180, 150], batch)
    kwargs = dict(num_layers=2, num_heads=8, ff_dim=Dim(2048, name="ff"), conv_kernel_size=31, input_layer=None)
    encoder = make.module(ConformerEncoder, feat, Dim(512, name="out"), **kwargs)
    out, loss = make.module(rf.Linear, encoder.out_dim, vocab), ctc_of(make, spatial, batch, vocab)
    x = torch.randn(8, 300, 512, device=make.device)

    def call() -> Tensor:
        encoded, out_spatial = encoder(tensor(x, batch, spatial, feat, feature_dim=feat), in_spatial_dim=spatial)
        return loss(out(encoded), out_spatial)

    return autocast(make, call), params(encoder, out)


def transformer_lm(make: Maker) -> Case:
    """:return: case of a training step of a Llama-like language model, pure low precision"""
    batch, vocab = Dim(8, name="batch"), Dim(10_000, name="vocab")
    spatial = seq_dim("time", [128, 128, 120, 110, 100, 90, 80, 64], batch)
    kwargs = dict(num_layers=4, num_heads=8, dropout=0.0, att_dropout=0.0, pos_enc=None, norm=rf.RMSNorm)
    kwargs.update(ff=FeedForwardGated, layer_opts={"self_att": rf.RotaryPosCausalSelfAttention})
    model = make.module(TransformerDecoder, None, vocab, Dim(512, name="model"), dtype=make.low, **kwargs)
    labels = make.labels(10_000, 8, 128)

    def call() -> torch.Tensor:
        tokens = tensor(labels, batch, spatial, sparse_dim=vocab)
        with rf.set_default_float_dtype_ctx(str(make.low).split(".")[1]):
            logits, _ = model(tokens, spatial_dim=spatial, state=model.default_initial_state(batch_dims=[batch]))
        return rf.cross_entropy(estimated=logits, target=tokens, axis=vocab, estimated_type="logits").raw_tensor

    return call, params(model)


CASES: Dict[str, Callable[[Maker], Case]] = {
    "layer norm, f32 parameters": norm(rf.LayerNorm),
    "layer norm, low parameters": norm(rf.LayerNorm, low_params=True),
    "rms norm, f32 parameters": norm(rf.RMSNorm),
    "rms norm, low parameters": norm(rf.RMSNorm, low_params=True),
    "group norm": norm(rf.GroupNorm, num_groups=8),
    "batch norm, masked": norm(rf.BatchNorm, use_mask=True),
    "attention, key padding": attention(),
    "attention, causal": attention(causal=True),
    "attention, dropout 0.1": attention(dropout=0.1),
    "attention, relative positions": rel_pos_attention,
    "cross entropy, 10k labels": cross_entropy,
    "linear + cross entropy, 50k labels": linear_cross_entropy,
    "CTC, 1k labels": ctc,
    "Conformer CTC step, AMP": conformer,
    "Transformer LM step, pure": transformer_lm,
}
