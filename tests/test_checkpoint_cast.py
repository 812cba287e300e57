"""
Checkpoint files on the command line: cast there and back, norms kept in float32, compare, inspect, and a large file.
"""

from __future__ import annotations
import json
import os
import subprocess
import sys
import time
import pytest
import torch
from returnn_upcast import checkpoint as C
from returnn_upcast.checkpoint import modules
from returnn_upcast.params import not_norms, to_bf16
from checkpoint_cases import BF16, F32, META, NEEDS, env, need, run, same, save
from param_models import MODELS, conformer, decoder, state_dict


@pytest.mark.parametrize("ending", NEEDS)
def test_cast_and_back(tmp_path, ending):
    need(ending)
    model = conformer()
    to_bf16(model, not_norms(model))
    state = state_dict(model)
    source, wide, back = save(tmp_path / "a.pt", state), tmp_path / f"b{ending}", tmp_path / f"c{ending}"
    assert run("cast", source, wide, "--dtype", "float32") == 0
    assert {x.dtype for x in C.read(wide).arrays.values()} == {F32}
    assert run("cast", wide, wide.with_name(f"d{ending}"), "--dtype", "float16") == 0  # the first dtypes stay recorded
    assert C.read(wide.with_name(f"d{ending}")).original_dtypes["input_projection.weight"] == "bfloat16"
    assert run("cast", wide, back, "--dtype", "original") == 0
    assert same(C.read(back).arrays, state) and C.read(back).meta == META


def test_keep_float32(tmp_path, capsys):
    model = conformer()
    source, target = save(tmp_path / "a.pt", state_dict(model)), tmp_path / "b.pt"
    norms = {name for name in state_dict(model) if not not_norms(model)(name, None)}
    assert run("cast", source, target, "--dtype", "bf16", "--keep-float32", "norms") == 0
    assert {name for name, x in C.read(target).arrays.items() if x.dtype == F32} == norms
    assert set(capsys.readouterr().out.removeprefix("float32: ").strip().split(", ")) == norms
    (tmp_path / "map.json").write_text(json.dumps(C.module_map(model)))
    options = ["--keep-float32", "norms", "*.pos_bias_?", "--modules", tmp_path / "map.json"]
    assert run("cast", source, target, "--dtype", "f16", *options) == 0
    kept = {name for name, x in C.read(target).arrays.items() if x.dtype == F32}
    assert kept - norms == {f"layers.{i}.self_att.pos_bias_{uv}" for i in range(2) for uv in "uv"}
    assert run("cast", target, tmp_path / "c.pt", "--dtype", "bf16", "--keep-float32", "*.bias") == 0  # widens f16
    assert C.read(tmp_path / "c.pt").arrays["layers.0.ffn1.linear_ff.bias"].dtype == F32
    capsys.readouterr()
    assert run("cast", source, tmp_path / "d.pt", "--dtype", "bf16", "--keep-float32", "nomrs") == 2
    assert "'nomrs' matches no parameter" in capsys.readouterr().err and not (tmp_path / "d.pt").exists()


def test_norms_by_shape_of_torch_names():
    model = MODELS["torch"]()
    found = C.casting.norms_by_shape(state_dict(model))
    assert set(found) == set(modules.norms_of(C.module_map(model), state_dict(model))) - {"batch.num_batches_tracked"}


def test_overflow_names_the_parameters(tmp_path, capsys):
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([70000.0]), "c": torch.tensor([float("inf")])}
    source, target = save(tmp_path / "a.pt", state), tmp_path / "b.pt"
    target.write_text("old")
    assert run("cast", source, target, "--dtype", "float16") == 2
    assert capsys.readouterr().err.strip().endswith("float16 (see allow_overflow): b")
    assert target.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]
    assert run("cast", source, target, "--dtype", "float16", "--allow-overflow") == 0
    assert C.read(target).arrays["b"].isinf().all()


def test_compare(tmp_path, capsys):
    nan = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    a = save(tmp_path / "a.pt", {"x": torch.tensor([3.0, 4.0]), "n": nan, "i": torch.tensor(9999)})
    b = save(tmp_path / "b.pt", {"x": torch.tensor([3.0, 4.5]), "n": nan, "i": torch.tensor(9999)})
    assert run("compare", a, a) == 0 and run("compare", a, b) == 1
    assert ["x", "float32", "0.1", "0.5"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert C.compare(C.read(a), C.read(b)).total == pytest.approx(0.5 / 26**0.5)
    assert run("compare", a, b, "--tol", "0.11") == 0 and run("compare", a, b, "--tol", "0.09") == 1
    c = save(tmp_path / "c.pt", {"x": torch.ones(3), "n": torch.zeros(4), "k": torch.tensor(1)})
    capsys.readouterr()
    assert run("compare", a, c, "--tol", "1e9") == 1
    out = capsys.readouterr().out
    assert "only in the first: i" in out and "only in the second: k" in out and "shapes differ: x: [2] and [3]" in out
    assert C.compare(C.read(a), C.read(c)).rows["n"][1] == float("inf")


def test_inspect(tmp_path, capsys):
    source = save(tmp_path / "a.pt", state_dict(decoder()))
    assert run("inspect", source) == 0
    out = capsys.readouterr().out
    assert "PyTorch, " in out and "epoch: 7" in out and "returnn_version: 1.20261022" in out
    total = sum(x.numel() for x in {id(x): x for x in decoder().parameters() for x in [x.raw_tensor]}.values())
    assert out.splitlines()[-1].split()[:2] == ["total", "float32"] and f"{total:,}" in out.splitlines()[-1]


def test_memory_and_progress_of_a_large_file(tmp_path):
    """
    200 MB of bf16 become 400 MB of f32 in a process that has 130 MB more address space than the mapped file needs.
    """
    state = {f"w{i}": torch.ones(1 << 21, dtype=BF16) for i in range(8)}
    state["one"] = torch.ones(84_000_000, dtype=BF16)
    size = os.path.getsize(save(tmp_path / "a.pt", state))
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
    done = subprocess.run(args, env=env(), text=True, check=True, capture_output=True, timeout=120)
    assert int(done.stdout) < 1.3 * size, (int(done.stdout), size, time.time() - start)
    lines = done.stderr.strip().splitlines()
    assert lines[-1].endswith("b.pt: 100 %") and len(lines) >= 5
    assert C.read(tmp_path / "b.pt").arrays["one"].dtype == F32
