#!/usr/bin/env python
"""
Stock RETURNN against returnn_upcast, interleaved in one run: time of forward and backward, and bytes kept for backward.

  python demos/demo-benchmark.py                     all cases, on the CPU
  python demos/demo-benchmark.py --device cuda norm  cases with "norm" in their name, on the GPU
  python demos/demo-benchmark.py --json out.json --plot out.png     (--plot needs the extra: returnn_upcast[plot])

Ratios are upcast over stock, each pair of runs side by side; the spread is that of their quartiles.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List, Sequence, Tuple
import argparse
import json
import platform
import statistics
import sys
import time
import torch
import returnn
import returnn.frontend as rf
from returnn.frontend.decoder.transformer import FeedForwardGated, TransformerDecoder
from returnn.frontend.encoder.conformer import ConformerEncoder
from returnn.tensor import Dim, Tensor
from returnn.util.basic import BehaviorVersion
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


def kept_bytes(func: Callable[[], torch.Tensor], own: Sequence[torch.Tensor]) -> int:
    """:return: bytes that the forward keeps for backward, the leaves aside"""
    leaves = {t.untyped_storage().data_ptr() for t in own}
    kept: Dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in leaves:
            kept[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = func()
    size = sum(storage.nbytes() for storage in kept.values())
    del out
    return size


def timed_step(func: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], device: str) -> float:
    """:return: seconds of one forward and backward"""
    for leaf in leaves:
        leaf.grad = None
    start = time.perf_counter()
    out = func()
    out.backward(torch.ones_like(out))
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(build: Callable[[Maker], Case], make: Maker, runs: int, warmup: int = 3) -> Dict[str, Any]:
    """:return: medians, ratios and their spread"""
    func, leaves = build(make)
    times: Dict[bool, List[float]] = {False: [], True: []}
    kept = {}
    for run in range(-warmup, runs):
        for on in (False, True):
            with rf.upcast.scope(on):
                seconds = timed_step(func, leaves, make.device)
                if run >= 0:
                    times[on].append(seconds)
    for on in (False, True):
        with rf.upcast.scope(on):
            kept[on] = kept_bytes(func, leaves)
    ratios = [ours / stock for stock, ours in zip(times[False], times[True])]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "stock_ms": statistics.median(times[False]) * 1e3,
        "upcast_ms": statistics.median(times[True]) * 1e3,
        "time_ratio": median,
        "time_ratio_quartiles": [low, high],
        "stock_mib": kept[False] / 2**20,
        "upcast_mib": kept[True] / 2**20,
    }


def plot(results: Dict[str, Dict[str, Any]], title: str, path: str):
    """Writes a bar chart of the ratios."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'returnn_upcast[plot]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(results)[::-1]
    fig, axis = plt.subplots(figsize=(8, 0.4 * len(names) + 1.5), layout="constrained")
    axis.barh(names, [results[n]["time_ratio"] for n in names], color="#4477aa")
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_xlabel("time of forward and backward, upcast / stock RETURNN")
    axis.set_title(title, fontsize=9)
    fig.savefig(path, dpi=120)


def main():
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of names; default: all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--plot", help="write a picture there")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no GPU")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rf.select_backend_torch()
    BehaviorVersion.set(38)
    rf.init_train_step_run_ctx(train_flag=True, step=0)
    returnn_upcast.install()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    title = f"RETURNN {returnn.__version__}, torch {torch.__version__}, {args.dtype}, {machine}, {args.runs} runs"
    print(
        title
        + "\n\n| case | stock ms | upcast ms | time ratio (quartiles) | kept MiB, stock | upcast |\n|---|---|---|---|---|---|"
    )
    results = {}
    for name, build in CASES.items():
        if not args.cases or any(part.lower() in name.lower() for part in args.cases):
            r = results[name] = measure(build, Maker(args.device, getattr(torch, args.dtype)), args.runs)
            low, high = r["time_ratio_quartiles"]
            print(
                f"| {name} | {r['stock_ms']:.1f} | {r['upcast_ms']:.1f} | {r['time_ratio']:.2f} ({low:.2f} to {high:.2f})"
                f" | {r['stock_mib']:.1f} | {r['upcast_mib']:.1f} |",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"title": title, "results": results}, file, indent=2)
    if args.plot:
        plot(results, title, args.plot)


if __name__ == "__main__":
    main()
