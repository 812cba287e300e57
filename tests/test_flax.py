"""
Between torch, Flax and RETURNN's JAX backend: exact there and back, leftovers are listed, and the command line.
"""

from __future__ import annotations
import argparse
import json
import logging
import numpy
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from returnn.torch.frontend.bridge import rf_module_to_pt_module
from returnn_upcast import checkpoint as C
from returnn_upcast import params as P
from returnn_upcast.checkpoint import cli
from checkpoint_cases import F32, same
from flax_cases import flax, jax, torch_backend  # noqa: F401, an autouse fixture
from param_models import INTS, MODELS, TorchNet, decoder, fill_biting, state_dict


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(name, dtype):
    model = MODELS[name]()
    state = fill_biting(state_dict(model), dtype)
    variables = C.to_flax(model, state)
    leaves = jax.tree_util.tree_leaves({k: variables[k] for k in ("params", "batch_stats")})
    assert {x.dtype.name for x in leaves} == {P.dtype_name(dtype)}
    assert same(C.from_flax(model, variables), state)
    # the map stands for the model, and survives JSON
    modules = json.loads(json.dumps(C.module_map(model)))
    assert same(C.from_flax(modules, C.to_flax(modules, state)), state)
    # and so do Flax's own files
    again = flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(variables))
    assert same(C.from_flax(model, again), state)


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
    assert same(C.from_flax(model, variables), model.state_dict())


def test_tied_output_layer():
    model = decoder()  # its output layer has the weight of the embedding, [vocab, model]
    state = state_dict(model)
    params = C.to_flax(model, state)["params"]
    assert params["input_embedding"]["embedding"].shape == (11, 16) and params["logits"]["kernel"].shape == (16, 11)
    assert C.module_map(model)["logits"] == "rf.Linear/transposed"
    del state["logits.weight"]  # as RETURNN's JAX backend saves it: once
    assert same(C.from_flax(model, C.to_flax(model, state)), state)


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
    assert same(C.read(tmp_path / "e.pt").arrays, state) and C.read(tmp_path / "e.pt").meta == {"epoch": 3}
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
