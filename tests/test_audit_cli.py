"""
``python -m returnn_upcast audit``: from a config and its data, and in RETURNN's training.
"""

from __future__ import annotations
from typing import Dict, List
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import pytest
import torch
from audit_cases import plain_ops  # noqa: F401, an autouse fixture
from audit_models import write_config
from returnn import __main__ as returnn_main
from returnn_upcast.audit import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _main(*args: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    parsed = parser.parse_args(["audit", *args])
    return parsed.func(parsed)


def _files(folder: pathlib.Path) -> Dict[str, tuple]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_config(tmp_path, capsys):
    exp, out = tmp_path / "exp", tmp_path / "out"
    exp.mkdir(), out.mkdir()
    config = write_config(exp)
    before = _files(exp)
    names = [str(out / name) for name in ("a.json", "a.html", "a.png")]
    code = _main(
        config, "--steps", "2", "--json", names[0], "++batch_size", "300", "--html", names[1], "--plot", names[2]
    )
    assert code == 0
    assert _files(exp) == before

    data = json.loads(pathlib.Path(names[0]).read_text())
    assert data["name"] == "my.config" and len(data["batches"]) == 2 and "3 sequences" in data["batches"][0]
    assert data["precision"] == "parameters bfloat16, no autocast"
    assert [v["name"] for v in data["variants"]] == ["off", "on", "on without cross_entropy", "on without rms_norm"]
    assert {(s["path"], s["op"]) for s in data["sites"]} == {("norm", "rms_norm"), ("(step)", "cross_entropy")}
    assert all(re.search(r"my\.config:\d+$", s["line"]) for s in data["sites"])
    assert all(0 < v["gradient_error"] < 0.02 and v["seconds"] > 0 and v["memory"] > 0 for v in data["variants"])
    assert pathlib.Path(names[1]).read_text().startswith("<!doctype html>")
    assert pathlib.Path(names[2]).read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert captured.out.count("on without rms_norm") == 1 and "batch 2 of 2: reference" in captured.err


def test_existing_model_and_checkpoint(tmp_path, capsys):
    config = write_config(tmp_path, "num_epochs = 1\n")
    assert _main(config, "--steps", "1", "--json", str(tmp_path / "0.json")) == 0
    state = _model_state()
    state["model"]["norm.scale"] += 1.0
    torch.save(state, tmp_path / "other.pt")
    torch.save({"model": {k: v for k, v in state["model"].items() if k != "norm.scale"}}, tmp_path / "lacks.pt")
    state["model"]["norm.scale"] = torch.ones(3)
    torch.save(state, tmp_path / "shape.pt")

    args = (config, "--steps", "1", "--checkpoint")
    assert _main(*args, str(tmp_path / "other.pt"), "--json", str(tmp_path / "1.json")) == 0
    losses = [json.loads((tmp_path / f"{i}.json").read_text())["variants"][0]["losses"][0]["value"] for i in (0, 1)]
    assert losses[0] != losses[1]
    capsys.readouterr()
    for name, words in [
        ("lacks.pt", "does not fit the model: it lacks 1 parameters: norm.scale"),
        ("shape.pt", "norm.scale is (3,), the model has (16,)"),
        ("none.pt", "no such file"),
        ("my.config", "my.config: "),
    ]:
        assert _main(*args, str(tmp_path / name)) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def _model_state() -> dict:
    config = returnn_main.config
    import returnn.frontend as rf
    from returnn.torch.frontend.bridge import rf_module_to_pt_module

    with rf.set_default_float_dtype_ctx("bfloat16"):
        model = rf_module_to_pt_module(config.typed_value("get_model")(epoch=1, step=0))
    return {"model": model.state_dict(), "epoch": 1, "step": 10}


def _wrong(body: str) -> str:
    return f"\ndef train_step(*, model, extern_data, **_kwargs):\n    {body}\n"


@pytest.mark.parametrize(
    "more, without, words",
    [
        ("", "train_step", "no train_step and no forward_step"),
        ("", "train", "no data, the config has none of train, dev"),
        ("min_seq_length = 100_000", None, "no data, the dataset"),
        ("train = {'class': 'Task12AXDataset', 'num_seqs': 0}", None, "the data: "),
        ("train = {'class': 'NoSuchDataset'}", None, "the data: "),
        ("backend = 'tensorflow'", None, "backend = 'tensorflow', only the torch backend can be audited"),
        ("", "get_model", "the model: "),
        ("raise KeyError('my own mistake')", None, "KeyError: 'my own mistake'"),
        (_wrong("raise KeyError('my own step')"), None, "variant 'on': KeyError: 'my own step'"),
        (_wrong("pass"), None, "marks no loss"),
    ],
    ids=[
        "no_step",
        "no_data",
        "all_filtered",
        "empty_data",
        "bad_data",
        "backend",
        "no_model",
        "config",
        "step",
        "no_loss",
    ],
)
def test_bad_config(more: str, without: str, words: str, tmp_path, capsys):
    assert _main(write_config(tmp_path, more, without=without), "--steps", "1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1] and lines[-1].startswith("audit: "), lines[-3:]
    if "my own" in words:
        assert any("my.config" in line and "line" in line for line in lines[:-1])
        assert not any("returnn_upcast/audit" in line for line in lines)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--stepz", "3"], "unknown option --stepz"),
        (["--reference", "bfloat16"], "invalid choice"),
    ],
)
def test_bad_options(args: List[str], words: str, tmp_path, capsys):
    with pytest.raises(SystemExit) as info:
        _main(write_config(tmp_path), *args)
    assert info.value.code == 2 and words in capsys.readouterr().err


def test_bad_files(tmp_path, capsys):
    assert _main(str(tmp_path / "none.config")) == 2
    assert "none.config: no such file" in capsys.readouterr().err
    assert _main(write_config(tmp_path), "--json", str(tmp_path / "nowhere" / "a.json")) == 2
    assert "is no directory" in capsys.readouterr().err


FORWARD = """
def forward_step(*, model, extern_data, **_kwargs):
    logits = model.out(model.norm(model.inner(extern_data["data"])))
    logits.mark_as_output("logits", shape=[batch_dim, time_dim, out_dim])
forward_data = train
"""


def test_forward_step_only(tmp_path):
    out = tmp_path / "a.json"
    config = write_config(tmp_path, FORWARD, without="train_step")
    assert _main(config, "--steps", "1", "--json", str(out)) == 0
    data = json.loads(out.read_text())
    assert [v["name"] for v in data["variants"]] == ["off", "on"]
    for v in data["variants"]:
        assert v["losses"][0]["name"] == "logits" and 0 < v["losses"][0]["difference"] < 0.02
        assert v["gradient_error"] is None


def test_autocast(tmp_path):
    out = tmp_path / "a.json"
    config = write_config(tmp_path, "torch_amp = 'bfloat16'\n", without="default_float_dtype")
    assert _main(config, "--steps", "1", "--json", str(out)) == 0
    data = json.loads(out.read_text())
    assert data["precision"] == "parameters float32, autocast to bfloat16"
    assert data["autocast"]["cuda"]["layer_norm"] == "float32" and data["variants"][1]["gradient_error"] > 1e-4


def _train(folder: pathlib.Path, more: str) -> str:
    folder.mkdir()
    hook = (
        "from returnn_upcast import patch\nfrom returnn_upcast.audit import training\npatch.apply([training.PATCH])\n"
    )
    config = write_config(folder, hook + more)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "returnn", config]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return (folder / "log").read_text()


def test_in_training_changes_no_number(tmp_path):
    audited = _train(tmp_path / "a", "rf_upcast_audit = {'every': 4}\n")
    plain = _train(tmp_path / "b", "")
    losses = lambda text: re.findall(r"ep 1 train, step \d+, ce (\S+),", text)
    assert losses(audited) == losses(plain) and len(losses(plain)) > 5
    lines = re.findall(r"rf_upcast_audit: step (\d+), gradient error (\S+), 0 NaN/inf in it, 0 ops", audited)
    assert [step for step, _ in lines] == ["0", "4", "8"] and all(1e-4 < float(x) < 0.1 for _, x in lines)
    assert "rf_upcast_audit" not in plain
    states = [torch.load(tmp_path / x / "model.001.pt")["model"] for x in "ab"]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_conformer_demo(tmp_path, capsys):
    out = tmp_path / "a.json"
    demo = str(ROOT / "demos" / "demo-ctc.config")
    assert (
        _main(demo, "++out_dir", str(tmp_path), "++batch_size", "{'data': 80_000}", "--steps", "1", "--json", str(out))
        == 0
    )
    data = json.loads(out.read_text())
    assert {"attention", "ctc_loss", "layer_norm"} <= {s["op"] for s in data["sites"] if s["low"]}
    errors = {v["name"]: v["gradient_error"] for v in data["variants"]}
    # that of the matmuls, mostly, which is not of the ops
    assert 0 < errors["on"] < 1.1 * errors["off"] < 0.1
    (ctc,) = [s for s in data["sites"] if s["op"] == "ctc_loss"]
    assert ctc["upcast_error"] < 1e-6 < 1e-4 < ctc["stock_error"] and "log_softmax is rounded" in ctc["cause"]
    assert not list(tmp_path.glob("log")) and not data["notes"]
