"""
The demos, as a user runs them, but for a few steps: RETURNN's own engine, in a process of its own, from another directory.
"""

from __future__ import annotations
from typing import List
import math
import os
import pathlib
import re
import subprocess
import sys
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# name -> its loss, its error, and how many epochs see all the data once, so that one of them has few steps
DEMOS = {"demo-ctc": ("ctc", "char_error", "8"), "demo-lm": ("ce", "bits_per_byte", "80")}


def _run(name: str, *options: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    # one thread: several that wait for each other on a busy machine take ten times as long
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "returnn", f"{ROOT}/demos/{name}.config", *options]
    return subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "name, options, upcast",
    [
        ("demo-ctc", [], True),
        ("demo-ctc", ["++rf_upcast", "False"], False),
        ("demo-ctc", ["++precision", "float32"], True),
        ("demo-lm", [], True),
        ("demo-lm", ["++precision", "float32", "++rf_upcast", "False"], False),
    ],
    ids=["ctc", "ctc-stock", "ctc-float32", "lm", "lm-stock-float32"],
)
def test_trains_one_epoch(name: str, options: List[str], upcast: bool, tmp_path: pathlib.Path):
    out_dir, cwd = tmp_path / "out", tmp_path / "elsewhere"
    cwd.mkdir()
    loss, error, partition_epoch = DEMOS[name]
    options = [*options, "++num_epochs", "1", "++partition_epoch", partition_epoch, "++out_dir", str(out_dir)]
    done = _run(name, *options, cwd=cwd)
    assert done.returncode == 0, done.stdout[-5000:]

    log = (out_dir / "log").read_text()
    steps = [float(x) for x in re.findall(rf"ep 1 train, step \d+, {loss} ([^ ,]+),", log)]
    assert len(steps) >= 5 and all(map(math.isfinite, steps)), steps
    (dev,) = re.findall(rf"Epoch 1 evaluation: dev: {loss} (\S+) {error} (\S+)", log)
    assert all(math.isfinite(float(x)) for x in dev), dev
    assert ("rf_upcast: float32 inside for" in log) == upcast

    assert {path.name for path in out_dir.iterdir()} >= {"log", "model.001.pt", "scores"}
    assert not list(cwd.iterdir())


@pytest.mark.parametrize("name", DEMOS)
def test_unknown_precision(name: str, tmp_path: pathlib.Path):
    done = _run(name, "++precision", "int8", "++out_dir", str(tmp_path), cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r"precision: expected bfloat16.*, got 'int8'", done.stdout)
