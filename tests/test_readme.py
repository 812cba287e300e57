"""
The README's Python examples run, section by section, in the order in which they stand there.
"""

from __future__ import annotations
import pathlib
import re
import subprocess
import sys
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"

# Sections whose blocks are complete programs. The others show lines of a config or of a model, tested elsewhere.
SECTIONS = {"Parameters and checkpoints": ["jax", "flax", "safetensors"]}


def _blocks(section: str):
    text = re.search(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", README.read_text(), re.M | re.S).group(1)
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


@pytest.mark.parametrize("section", SECTIONS)
def test_examples(section, tmp_path):
    for module in SECTIONS[section]:
        pytest.importorskip(module)
    blocks = _blocks(section)
    assert blocks
    script = tmp_path / "example.py"
    script.write_text("\n\n".join(blocks))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_all_ops_are_in_the_table():
    import returnn_upcast

    text = README.read_text()
    assert all(f"`{op}`" in text for op in returnn_upcast.ALL_OPS)
    assert all(f"`{name}`" in text for name in returnn_upcast.upcast.__all__)
