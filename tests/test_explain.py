"""
``python -m returnn_upcast explain``.
"""

from __future__ import annotations
import subprocess
import sys
import pytest

CONFIG = """#!/usr/bin/env python
import returnn_upcast
returnn_upcast.install()
backend = "torch"
behavior_version = 39
rf_upcast = {"attention": False}
"""


def _run(tmp_path, text, *options):
    path = tmp_path / "my.config"
    if text is not None:
        path.write_text(text)
    cmd = [sys.executable, "-m", "returnn_upcast", "explain", str(path), *options]
    return subprocess.run(cmd, capture_output=True, text=True, timeout=120)


def _table(out):
    return {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines() if len(line.split()) > 2}


def test_policy_reasons_and_hooks(tmp_path):
    result = _run(tmp_path, CONFIG)
    assert result.returncode == 0, result.stderr
    table = _table(result.stdout)
    assert table["attention"] == ["off", "option rf_upcast = {'attention': False}"]
    assert table["layer_norm"] == ["on", "behavior_version 39"]
    assert table["softmax"] == ["off", "default, opt-in"]
    assert "RETURNN 1.2026" in result.stdout and "torch 2." in result.stdout
    assert "returnn.frontend.normalization.LayerNorm.__call__" in result.stdout
    assert "TorchBackend.ctc_loss" in result.stdout
    assert "too old" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "options, ops",
    [
        (["++rf_upcast", "False"], {"attention": "off", "layer_norm": "off"}),
        (
            ["++rf_upcast", "{'ctc_loss': False, 'softmax': True}"],
            {"attention": "on", "ctc_loss": "off", "softmax": "on"},
        ),
    ],
)
def test_command_line_options(tmp_path, options, ops):
    table = _table(_run(tmp_path, CONFIG, *options).stdout)
    assert {op: table[op][0] for op in ops} == ops


def test_without_install(tmp_path):
    result = _run(tmp_path, '#!/usr/bin/env python\nbackend = "torch"\nbehavior_version = 38\n', "++rf_upcast", "True")
    assert result.returncode == 0 and "does not call returnn_upcast.install()" in result.stdout


def test_newer_behavior_version_still_warns(tmp_path):
    result = _run(tmp_path, CONFIG.replace("39", "40"))
    assert "too old" in result.stdout + result.stderr


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "my.config"),
        ("#!/usr/bin/env python\nraise KeyError('my own mistake')\n", "KeyError: 'my own mistake'"),
        (CONFIG.replace("attention", "atention"), "unknown op 'atention'"),
        ("#!/usr/bin/env python\nx = (\n", "SyntaxError"),
    ],
    ids=["missing", "raises", "unknown_op", "syntax"],
)
def test_bad_config_is_one_line_and_exit_code_2(tmp_path, text, words):
    result = _run(tmp_path, text)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("explain: ")]
    assert len(lines) == 1 and words in lines[0], result.stderr
    assert "Traceback" not in result.stderr
