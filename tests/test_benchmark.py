"""
The benchmark demo: a case of it, with its table, JSON and picture.
"""

from __future__ import annotations
import json
import pathlib
import subprocess
import sys
import pytest
import torch

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "demos" / "demo-benchmark.py"


def _run(*args):
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=200)


def test_table_json_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    done = _run("--runs", "2", "rms norm, low", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"))
    assert done.returncode == 0, done.stderr
    assert "| rms norm, low parameters |" in done.stdout and f"torch {torch.__version__}" in done.stdout
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"].values()
    assert result["time_ratio"] > 0 and result["upcast_mib"] < result["stock_mib"]
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_clear_error():
    done = _run("--device", "cuda")
    assert done.returncode == 2 and "--device cuda: this torch sees no GPU" in done.stderr
