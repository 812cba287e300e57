"""
Checkpoint files: every format keeps every bit and the metadata, bad input is named, and a failure leaves the old file.
"""

from __future__ import annotations
import argparse
import io
import json
import os
import pathlib
import pickle
import resource
import signal
import subprocess
import sys
import time
import zipfile
import numpy
import pytest
import torch
from returnn.config import Config, global_config_ctx
from returnn_upcast import checkpoint as C
from returnn_upcast.checkpoint import cli, files, modules
from returnn_upcast.params import not_norms, to_bf16
from param_models import INTS, MODELS, conformer, decoder, fill_biting, same_bits, state_dict

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
META = {"epoch": 7, "step": 1234, "effective_learning_rate": 1e-3 / 3, "returnn_version": "1.20261022"}
NEEDS = {".safetensors": ["safetensors"], ".msgpack": ["msgpack"], ".orbax": ["orbax.checkpoint"], ".pt": []}


def _need(*endings):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for ending in endings:
        for module in NEEDS[ending]:
            pytest.importorskip(module)


def _save(path, model=None, meta=None):
    """as RETURNN's engine does"""
    torch.save({"model": model or state_dict(decoder()), **(META if meta is None else meta)}, path)
    return str(path)


def _run(*args) -> int:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(list(map(str, args)))
    return args.func(args)


def _env():
    return {**os.environ, "PYTHONPATH": str(pathlib.Path(C.__file__).parents[2])}


def _same(a, b) -> bool:
    return set(a) == set(b) and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ending", NEEDS)
def test_round_trip_is_exact(tmp_path, ending, name, dtype):
    _need(ending)
    state = fill_biting(state_dict(MODELS[name]()), dtype)
    source = _save(tmp_path / "a.pt", state)
    C.write(tmp_path / f"b{ending}", C.read(source))
    C.write(tmp_path / "c.pt", C.read(tmp_path / f"b{ending}"))
    assert _same(C.read(tmp_path / f"b{ending}").arrays, state)
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert _same(back.pop("model"), state)
    assert back == META and type(back["effective_learning_rate"]) is float


def test_all_other_dtypes(tmp_path):
    _need(".safetensors")
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
    source = _save(tmp_path / "a.pt", state)
    for ending in (".pt", ".safetensors"):
        C.write(tmp_path / f"b{ending}", C.read(source))
        assert _same(C.read(tmp_path / f"b{ending}").arrays, state), ending
    for mmap in (False, True):
        assert _same(torch.load(tmp_path / "b.pt", mmap=mmap, weights_only=True)["model"], state)


def test_written_files_are_what_the_libraries_write(tmp_path):
    _need(".safetensors")
    import safetensors.torch

    state = fill_biting(state_dict(decoder()), BF16)
    ckpt = C.read(_save(tmp_path / "a.pt", state))
    C.write(tmp_path / "a.safetensors", ckpt)
    assert _same(safetensors.torch.load_file(tmp_path / "a.safetensors"), state)
    safetensors.torch.save_file({k: v.clone() for k, v in state.items()}, tmp_path / "b.safetensors", {"who": "me"})
    again = C.read(tmp_path / "b.safetensors")
    assert _same(again.arrays, state) and again.meta == {"who": "me"}
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
    assert _same(C.read(tmp_path / "old.pt").arrays, model.state_dict())


def test_metadata_of_pt(tmp_path):
    meta = {**META, "effective_learning_rate": numpy.float64(0.1), "extra": {"x": torch.ones(2)}}
    C.write(tmp_path / "b.pt", C.read(_save(tmp_path / "a.pt", meta=meta)))
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["effective_learning_rate"] == 0.1 and back["extra"]["x"].tolist() == [1, 1]
    _need(".safetensors")
    with pytest.raises(C.CheckpointError, match=r"only .pt can store: extra \(dict\)"):
        C.write(tmp_path / "b.safetensors", C.read(tmp_path / "b.pt"))


def test_returnn_engine_loads_a_cast_checkpoint(tmp_path):
    from returnn.torch.engine import Engine

    model = decoder()
    source = _save(tmp_path / "a.pt", state_dict(model))
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
    assert _same(loaded, torch.load(target, weights_only=True)["model"])
    assert loaded["layers.0.ff.linear_ff.weight"].dtype == BF16 and loaded["final_layer_norm.scale"].dtype == F32


@pytest.mark.parametrize("ending", NEEDS)
def test_cast_and_back(tmp_path, ending):
    _need(ending)
    model = conformer()
    to_bf16(model, not_norms(model))
    state = state_dict(model)
    source, wide, back = _save(tmp_path / "a.pt", state), tmp_path / f"b{ending}", tmp_path / f"c{ending}"
    assert _run("cast", source, wide, "--dtype", "float32") == 0
    assert {x.dtype for x in C.read(wide).arrays.values()} == {F32}
    assert _run("cast", wide, wide.with_name(f"d{ending}"), "--dtype", "float16") == 0  # the first dtypes stay recorded
    assert C.read(wide.with_name(f"d{ending}")).original_dtypes["input_projection.weight"] == "bfloat16"
    assert _run("cast", wide, back, "--dtype", "original") == 0
    assert _same(C.read(back).arrays, state) and C.read(back).meta == META


def test_keep_float32(tmp_path, capsys):
    model = conformer()
    source, target = _save(tmp_path / "a.pt", state_dict(model)), tmp_path / "b.pt"
    norms = {name for name in state_dict(model) if not not_norms(model)(name, None)}
    assert _run("cast", source, target, "--dtype", "bf16", "--keep-float32", "norms") == 0
    assert {name for name, x in C.read(target).arrays.items() if x.dtype == F32} == norms
    assert set(capsys.readouterr().out.removeprefix("float32: ").strip().split(", ")) == norms
    (tmp_path / "map.json").write_text(json.dumps(C.module_map(model)))
    options = ["--keep-float32", "norms", "*.pos_bias_?", "--modules", tmp_path / "map.json"]
    assert _run("cast", source, target, "--dtype", "f16", *options) == 0
    kept = {name for name, x in C.read(target).arrays.items() if x.dtype == F32}
    assert kept - norms == {f"layers.{i}.self_att.pos_bias_{uv}" for i in range(2) for uv in "uv"}
    assert _run("cast", target, tmp_path / "c.pt", "--dtype", "bf16", "--keep-float32", "*.bias") == 0  # widens f16
    assert C.read(tmp_path / "c.pt").arrays["layers.0.ffn1.linear_ff.bias"].dtype == F32
    capsys.readouterr()
    assert _run("cast", source, tmp_path / "d.pt", "--dtype", "bf16", "--keep-float32", "nomrs") == 2
    assert "'nomrs' matches no parameter" in capsys.readouterr().err and not (tmp_path / "d.pt").exists()


def test_norms_by_shape_of_torch_names():
    model = MODELS["torch"]()
    found = C.casting.norms_by_shape(state_dict(model))
    assert set(found) == set(modules.norms_of(C.module_map(model), state_dict(model))) - {"batch.num_batches_tracked"}


def test_overflow_names_the_parameters(tmp_path, capsys):
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([70000.0]), "c": torch.tensor([float("inf")])}
    source, target = _save(tmp_path / "a.pt", state), tmp_path / "b.pt"
    target.write_text("old")
    assert _run("cast", source, target, "--dtype", "float16") == 2
    assert capsys.readouterr().err.strip().endswith("float16 (see allow_overflow): b")
    assert target.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]
    assert _run("cast", source, target, "--dtype", "float16", "--allow-overflow") == 0
    assert C.read(target).arrays["b"].isinf().all()


def test_compare(tmp_path, capsys):
    nan = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    a = _save(tmp_path / "a.pt", {"x": torch.tensor([3.0, 4.0]), "n": nan, "i": torch.tensor(9999)})
    b = _save(tmp_path / "b.pt", {"x": torch.tensor([3.0, 4.5]), "n": nan, "i": torch.tensor(9999)})
    assert _run("compare", a, a) == 0 and _run("compare", a, b) == 1
    assert ["x", "float32", "0.1", "0.5"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert C.compare(C.read(a), C.read(b)).total == pytest.approx(0.5 / 26**0.5)
    assert _run("compare", a, b, "--tol", "0.11") == 0 and _run("compare", a, b, "--tol", "0.09") == 1
    c = _save(tmp_path / "c.pt", {"x": torch.ones(3), "n": torch.zeros(4), "k": torch.tensor(1)})
    capsys.readouterr()
    assert _run("compare", a, c, "--tol", "1e9") == 1
    out = capsys.readouterr().out
    assert "only in the first: i" in out and "only in the second: k" in out and "shapes differ: x: [2] and [3]" in out
    assert C.compare(C.read(a), C.read(c)).rows["n"][1] == float("inf")


def test_inspect(tmp_path, capsys):
    source = _save(tmp_path / "a.pt", state_dict(decoder()))
    assert _run("inspect", source) == 0
    out = capsys.readouterr().out
    assert "PyTorch, " in out and "epoch: 7" in out and "returnn_version: 1.20261022" in out
    total = sum(x.numel() for x in {id(x): x for x in decoder().parameters() for x in [x.raw_tensor]}.values())
    assert out.splitlines()[-1].split()[:2] == ["total", "float32"] and f"{total:,}" in out.splitlines()[-1]


def test_bad_input(tmp_path, capsys):
    source = _save(tmp_path / "a.pt")
    text = pathlib.Path(source).read_bytes()

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/hacked",)

    bad = {
        "truncated.pt": (text[: len(text) // 2], "truncated, or no PyTorch checkpoint"),
        "empty.pt": (b"", "truncated, or no PyTorch checkpoint"),
        "text.pt": (b"hello world " * 100, "text.pt"),
        "evil.pt": (_pickled({"model": {"w": torch.ones(1)}, "x": Evil()}), "could run code"),
        "evil2.pt": (pickle.dumps(Evil(), protocol=2), "could run code"),
        "list.pt": (_pickled([torch.ones(1)]), "expected a checkpoint, i.e. a dict, got list"),
        "optimizer.pt": (_pickled({"optimizer": {}, "epoch": 1}), "these are none: optimizer, epoch"),
        "a.foo": (text, "unknown ending '.foo', known: .pt, "),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        assert _run("inspect", tmp_path / name) == 2, name
        err = capsys.readouterr().err
        assert message in err and name in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "hacked").exists()
    assert _run("inspect", tmp_path / "none.pt") == 2 and "does not exist" in capsys.readouterr().err
    assert _run("cast", source, tmp_path / "b.pt", "--dtype", "int8") == 2
    assert "dtype: expected one of bfloat16" in capsys.readouterr().err
    assert _run("cast", source, tmp_path / "b.pt", "--dtype", "original") == 2
    assert "does not say which dtypes it had" in capsys.readouterr().err
    assert _run("cast", source, tmp_path / "b.xyz", "--dtype", "bf16") == 2 and not (tmp_path / "b.pt").exists()


def _pickled(obj) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


@pytest.mark.parametrize("ending", [".safetensors", ".msgpack", ".orbax"])
def test_bad_input_of_other_formats(tmp_path, ending, capsys):
    _need(ending)
    good = tmp_path / f"good{ending}"
    C.write(good, C.read(_save(tmp_path / "a.pt", {"w": torch.randn(1000)})))
    bad = tmp_path / f"bad{ending}"
    if ending == ".orbax":
        bad.mkdir()
    else:
        bad.write_bytes(good.read_bytes()[:-100])
    (tmp_path / f"foreign{ending}").write_bytes(b"hello world " * 100)
    for name in ("bad", "foreign"):
        assert _run("inspect", tmp_path / f"{name}{ending}") == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {tmp_path}/{name}{ending}") and len(err.strip().splitlines()) == 1
    if ending == ".msgpack":
        bad.write_bytes(good.read_bytes() + b"more")
        assert _run("inspect", bad) == 2 and "more data after the end" in capsys.readouterr().err


def test_names_that_clash(tmp_path):
    _need(".msgpack", ".orbax")
    state = {"a": torch.ones(1), "a.b": torch.ones(1), "a.b.c": torch.ones(1), "_x": torch.ones(1)}
    ckpt = C.read(_save(tmp_path / "a.pt", state))
    with pytest.raises(C.CheckpointError, match="nested maps: a.b, a.b.c"):
        C.write(tmp_path / "a.msgpack", ckpt)
    with pytest.raises(C.CheckpointError, match="underscore: _x"):
        C.write(tmp_path / "a.orbax", ckpt)
    with pytest.raises(C.CheckpointError, match="without elements: e"):
        C.write(tmp_path / "a.orbax", C.Checkpoint({"e": torch.zeros(0)}))
    assert os.listdir(tmp_path) == ["a.pt"]


def test_never_over_the_input(tmp_path, capsys):
    source = pathlib.Path(_save(tmp_path / "a.pt"))
    os.symlink(source, tmp_path / "link.pt")
    os.link(source, tmp_path / "hard.pt")
    before = source.read_bytes()
    for target in (source, tmp_path / "link.pt", tmp_path / "hard.pt", tmp_path / "x" / ".." / "a.pt"):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert _run("cast", source, target, "--dtype", "bf16") == 2
        assert "is the input" in capsys.readouterr().err and source.read_bytes() == before
    _need(".orbax")
    C.write(tmp_path / "a.orbax", C.read(source))
    assert _run("cast", tmp_path / "a.orbax", tmp_path / "a.orbax" / "b.pt", "--dtype", "bf16") == 2
    assert "is the input" in capsys.readouterr().err
    os.rename(source, tmp_path / "a.orbax" / "c.pt")
    assert _run("convert", tmp_path / "a.orbax" / "c.pt", tmp_path / "a.orbax") == 2
    assert "is the input" in capsys.readouterr().err and (tmp_path / "a.orbax" / "c.pt").exists()


def test_target_is_replaced_whole(tmp_path):
    _need(".orbax")
    ckpt = C.read(_save(tmp_path / "a.pt", {"w": torch.randn(3)}))
    for ending in (".pt", ".orbax"):
        for _ in range(2):
            C.write(tmp_path / f"b{ending}", ckpt)
        assert _same(C.read(tmp_path / f"b{ending}").arrays, ckpt.arrays)
    os.symlink("b.pt", tmp_path / "link.pt")
    C.write(tmp_path / "link.pt", C.Checkpoint({"v": torch.ones(1)}))
    assert (tmp_path / "link.pt").is_symlink() and list(C.read(tmp_path / "b.pt").arrays) == ["v"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.orbax", "b.pt", "link.pt"]


def test_read_only_targets(tmp_path, capsys):
    source, target = _save(tmp_path / "a.pt"), tmp_path / "b.pt"
    target.write_text("old")
    target.chmod(0o444)
    assert _run("cast", source, target, "--dtype", "bf16") == 2
    assert "read-only" in capsys.readouterr().err and target.read_text() == "old"
    assert _run("cast", source, "/proc/b.pt", "--dtype", "bf16") == 2
    assert "cannot write /proc/b.pt" in capsys.readouterr().err
    assert _run("cast", source, tmp_path / "no" / "b.pt", "--dtype", "bf16") == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("ending", NEEDS)
def test_full_disk_leaves_the_old_file(tmp_path, ending, capsys):
    _need(ending)
    source, target = _save(tmp_path / "a.pt", {"w": torch.randn(1 << 18)}), tmp_path / f"b{ending}"
    C.write(target, C.Checkpoint({"old": torch.ones(1)}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # writing more than this fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        code = _run("convert", source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2 and f"cannot write {target}" in capsys.readouterr().err
    assert list(C.read(target).arrays) == ["old"] and sorted(os.listdir(tmp_path)) == ["a.pt", f"b{ending}"]


def test_kill_while_writing_leaves_the_old_file(tmp_path):
    source, target = _save(tmp_path / "a.pt", {"w": torch.randn(1 << 16)}), tmp_path / "b.pt"
    target.write_text("old")
    script = (
        "import os, sys, time\n"
        "from returnn_upcast import checkpoint as C\n"
        "class Slow(dict):\n"
        "    def __getitem__(self, name):\n"
        "        if any(f.endswith('.tmp') for f in os.listdir(sys.argv[3])):\n"
        "            print('writing', flush=True); time.sleep(60)\n"
        "        return super().__getitem__(name)\n"
        "ckpt = C.read(sys.argv[1])\n"
        "ckpt.arrays = Slow(ckpt.arrays)\n"
        "C.write(sys.argv[2], ckpt)\n"
    )
    args = [sys.executable, "-c", script, source, str(target), str(tmp_path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, env=_env(), text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.kill()
    assert target.read_text() == "old"
    C.cast_file(source, target, "bf16")  # what the killed one left does not disturb
    assert C.read(target).arrays["w"].dtype == BF16


def test_failure_between_the_two_renames_brings_the_old_directory_back(tmp_path, monkeypatch):
    _need(".orbax")
    C.write(tmp_path / "b.orbax", C.Checkpoint({"old": torch.ones(1)}))
    rename, calls = os.rename, []

    def failing(a, b):
        calls.append((a, b))
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(a, b)

    ckpt = C.Checkpoint({"new": torch.ones(1)})
    monkeypatch.setattr(
        files.os, "rename", lambda a, b: failing(a, b) if str(tmp_path / "b.orbax") in (a, b) else rename(a, b)
    )
    with pytest.raises(C.CheckpointError, match="Input/output error"):
        C.write(tmp_path / "b.orbax", ckpt)
    monkeypatch.undo()
    assert list(C.read(tmp_path / "b.orbax").arrays) == ["old"] and os.listdir(tmp_path) == ["b.orbax"]


def test_extras_are_named(tmp_path, monkeypatch, capsys):
    source = _save(tmp_path / "a.pt")
    for module in ("safetensors", "msgpack", "orbax", "orbax.checkpoint", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.safetensors").write_bytes(b"x")
    assert _run("inspect", tmp_path / "a.safetensors") == 2
    assert "pip install 'returnn_upcast[safetensors]'" in capsys.readouterr().err
    for ending in (".msgpack", ".orbax"):
        assert _run("convert", source, tmp_path / f"b{ending}") == 2
        assert "pip install 'returnn_upcast[jax]'" in capsys.readouterr().err
    assert _run("cast", source, tmp_path / "b.pt", "--dtype", "bf16") == 0  # all else works without
    script = (
        "import sys, torch\n"
        "sys.modules['ml_dtypes'] = None\n"
        "from returnn_upcast import checkpoint as C\n"
        "assert not {'jax', 'flax', 'orbax', 'safetensors', 'msgpack'} & set(sys.modules)\n"
        "C.to_flax({'': 'rf.Linear'}, {'weight': torch.ones(2, 2)})\n"
        "try: C.to_flax({'': 'rf.Linear'}, {'weight': torch.ones(2, 2, dtype=torch.bfloat16)})\n"
        "except ImportError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=_env(), text=True, check=True, capture_output=True)
    assert "pip install 'returnn_upcast[jax]'" in done.stdout


def test_memory_and_progress_of_a_large_file(tmp_path):
    """
    200 MB of bf16 become 400 MB of f32 in a process that has 130 MB more address space than the mapped file needs.
    """
    state = {f"w{i}": torch.ones(1 << 21, dtype=BF16) for i in range(8)}
    state["one"] = torch.ones(84_000_000, dtype=BF16)
    size = os.path.getsize(_save(tmp_path / "a.pt", state))
    del state
    script = (
        "import resource, sys\n"
        "from returnn_upcast import checkpoint as C\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "C.cast_file(sys.argv[1], sys.argv[2], 'float32')\n"
        "print(peak() - before)\n"
    )
    args = [sys.executable, "-c", script, str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    start = time.time()
    done = subprocess.run(args, env=_env(), text=True, check=True, capture_output=True, timeout=120)
    assert int(done.stdout) < 1.3 * size, (int(done.stdout), size, time.time() - start)
    lines = done.stderr.strip().splitlines()
    assert lines[-1].endswith("b.pt: 100 %") and len(lines) >= 5
    assert C.read(tmp_path / "b.pt").arrays["one"].dtype == F32
