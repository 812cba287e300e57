"""
The package's own rules: who may import what, no side effect of importing, and the size of files and functions.
"""

from __future__ import annotations
import ast
import pathlib
import subprocess
import sys
import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "returnn_upcast"
FILES = sorted(PACKAGE.rglob("*.py"))
STDLIB = set(sys.stdlib_module_names)

# What a file may import at its top, by its place in the package; "." is the package itself.
ALLOWED = {
    "policy": set(),
    "patch": {".policy"},
    "version": set(),
    "dtypes": set(),
    "config": {".policy", "returnn"},
    "ops": {".ops", "torch"},
    "hooks": {".policy", ".dtypes", ".patch", ".config", ".ops", ".hooks", ".upcast", "returnn", "torch"},
    "upcast": {".policy", ".dtypes", ".hooks", ".ops", "returnn"},
    "params": {".params", "torch", "numpy"},
    "checkpoint": {".params", ".checkpoint", "torch", "numpy"},
    "__init__": {".policy", ".config", ".hooks", ".upcast", ".version"},
}


def _name(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _imports(path: pathlib.Path):
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ("." + (base or (name,))[0].split(".")[0] for name in names)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports(path):
    allowed = ALLOWED.get(_name(path).split(".")[0])
    if allowed is not None:
        found = {name for name in _imports(path) if name not in STDLIB}
        assert found <= allowed, f"{path.name} imports {sorted(found - allowed)}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_size(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node)
            code = node.end_lineno - node.body[0].lineno + 1 - (len(doc.splitlines()) if doc else 0)
            assert code <= 40, f"{node.name} has {code} lines"
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and node.col_offset == 0:
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


@pytest.mark.parametrize("files", ["tests/*.py", "demos/*.py", "returnn_upcast/ops/*.h", "returnn_upcast/ops/*.cpp"])
def test_size_of_other_files(files: str):
    lines = {path.name: path.read_text().splitlines() for path in PACKAGE.parent.glob(files)}
    assert lines and not [name for name in lines if len(lines[name]) > 300]


def test_lines_of_native_code():
    files = [path for ending in ("*.h", "*.cpp") for path in PACKAGE.rglob(ending)]
    assert files and not [path.name for path in files if max(map(len, path.read_text().splitlines())) > 120]


def test_dtypes_are_asked_for_by_our_own_function():
    """rf.is_float_dtype("bfloat16") is False on RETURNN 1.20260722"""
    assert not [path.name for path in FILES if "is_float_dtype" in path.read_text()]


def test_importing_has_no_side_effect():
    script = (
        "import returnn.frontend as rf\n"
        "from returnn.util.basic import BehaviorVersion\n"
        "before = dict(vars(rf)), BehaviorVersion._latest_behavior_version, rf.LayerNorm.__call__\n"
        "import sys, returnn_upcast\n"
        "assert before == (dict(vars(rf)), BehaviorVersion._latest_behavior_version, rf.LayerNorm.__call__)\n"
        "assert 'torch' not in sys.modules and not returnn_upcast.is_installed()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
