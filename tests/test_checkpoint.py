"""
Checkpoint files: every format keeps every bit and the metadata, and the libraries and RETURNN's engine load them.
"""

from __future__ import annotations
import pathlib
import zipfile
import numpy
import pytest
import torch
from returnn.config import Config, global_config_ctx
from returnn_upcast import checkpoint as C
from returnn_upcast.params import not_norms, to_bf16
from checkpoint_cases import BF16, F32, META, NEEDS, need, same, save
from param_models import INTS, MODELS, decoder, fill_biting, state_dict


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ending", NEEDS)
def test_round_trip_is_exact(tmp_path, ending, name, dtype):
    need(ending)
    state = fill_biting(state_dict(MODELS[name]()), dtype)
    source = save(tmp_path / "a.pt", state)
    C.write(tmp_path / f"b{ending}", C.read(source))
    C.write(tmp_path / "c.pt", C.read(tmp_path / f"b{ending}"))
    assert same(C.read(tmp_path / f"b{ending}").arrays, state)
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert same(back.pop("model"), state)
    assert back == META and type(back["effective_learning_rate"]) is float


def test_all_other_dtypes(tmp_path):
    need(".safetensors")
    state = {
        "bool": torch.tensor([True, False]),
        **{str(t): torch.tensor([1, 2, 3]).to(t) for t in (torch.uint8, torch.int8, torch.int16, torch.int32)},
        **{str(t): torch.tensor([1.5, -2.0]).to(t) for t in (torch.float8_e4m3fn, torch.float8_e5m2)},
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "complex": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "view": torch.arange(12.0).view(3, 4).t()[1:],
        "expanded": torch.ones(1).expand(5),
    }
    source = save(tmp_path / "a.pt", state)
    for ending in (".pt", ".safetensors"):
        C.write(tmp_path / f"b{ending}", C.read(source))
        assert same(C.read(tmp_path / f"b{ending}").arrays, state), ending
    for mmap in (False, True):
        assert same(torch.load(tmp_path / "b.pt", mmap=mmap, weights_only=True)["model"], state)


def test_written_files_are_what_the_libraries_write(tmp_path):
    need(".safetensors")
    import safetensors.torch

    state = fill_biting(state_dict(decoder()), BF16)
    ckpt = C.read(save(tmp_path / "a.pt", state))
    C.write(tmp_path / "a.safetensors", ckpt)
    assert same(safetensors.torch.load_file(tmp_path / "a.safetensors"), state)
    safetensors.torch.save_file({k: v.clone() for k, v in state.items()}, tmp_path / "b.safetensors", {"who": "me"})
    again = C.read(tmp_path / "b.safetensors")
    assert same(again.arrays, state) and again.meta == {"who": "me"}
    C.write(tmp_path / "b.pt", ckpt)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    # tied parameters share their storage, as when torch.save writes them
    assert loaded["logits.weight"].data_ptr() == loaded["input_embedding.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "a.pt") as a, zipfile.ZipFile(tmp_path / "b.pt") as b:
        assert b.testzip() is None
        data = [sum("/data/" in name for name in archive.namelist()) for archive in (a, b)]
        assert data[0] == data[1] == len(state) - 1
    offset = (
        pathlib.Path(tmp_path / "b.pt").read_bytes().index(state["logits.weight"].view(torch.uint8).numpy().tobytes())
    )
    assert offset % 64 == 0


def test_bare_state_dicts_and_module_versions(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    C.cast_file(tmp_path / "a.pt", tmp_path / "b.pt", "bf16")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back._metadata == model.state_dict()._metadata and back._metadata["1"]["version"] == 2
    to_bf16(model).load_state_dict(back)
    assert C.read(tmp_path / "b.pt").original_dtypes["0.weight"] == "float32"
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(C.read(tmp_path / "old.pt").arrays, model.state_dict())


def test_metadata_of_pt(tmp_path):
    meta = {**META, "effective_learning_rate": numpy.float64(0.1), "extra": {"x": torch.ones(2)}}
    C.write(tmp_path / "b.pt", C.read(save(tmp_path / "a.pt", meta=meta)))
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["effective_learning_rate"] == 0.1 and back["extra"]["x"].tolist() == [1, 1]
    need(".safetensors")
    with pytest.raises(C.CheckpointError, match=r"only .pt can store: extra \(dict\)"):
        C.write(tmp_path / "b.safetensors", C.read(tmp_path / "b.pt"))


def test_returnn_engine_loads_a_cast_checkpoint(tmp_path):
    from returnn.torch.engine import Engine

    model = decoder()
    source = save(tmp_path / "a.pt", state_dict(model))
    target = str(tmp_path / "b.pt")
    C.cast_file(source, target, "bfloat16", keep_float32=["norms"], modules=C.module_map(model))

    def get_model(**_kwargs):
        new = decoder()
        return to_bf16(new, not_norms(new))

    config = Config(
        {
            "task": "forward",
            "backend": "torch",
            "device": "cpu",
            "behavior_version": 24,
            "extern_data": {"data": {"dim": 8}},
            "load": target,
            "get_model": get_model,
            "forward_step": lambda **_kwargs: None,
            "model_outputs": {},
        }
    )
    with global_config_ctx(config):
        engine = Engine(config)
        engine.init_network_from_config(config)
    assert engine.epoch == META["epoch"]
    loaded = engine.get_pt_model().state_dict()
    assert same(loaded, torch.load(target, weights_only=True)["model"])
    assert loaded["layers.0.ff.linear_ff.weight"].dtype == BF16 and loaded["final_layer_norm.scale"].dtype == F32
