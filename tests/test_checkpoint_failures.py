"""
Checkpoint files that cannot be read or written: bad input is named, and a failure leaves the old file.
"""

from __future__ import annotations
import io
import os
import pathlib
import pickle
import resource
import signal
import subprocess
import sys
import pytest
import torch
from returnn_upcast import checkpoint as C
from returnn_upcast.checkpoint import files
from checkpoint_cases import BF16, NEEDS, env, need, run, same, save


def test_bad_input(tmp_path, capsys):
    source = save(tmp_path / "a.pt")
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
        assert run("inspect", tmp_path / name) == 2, name
        err = capsys.readouterr().err
        assert message in err and name in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "hacked").exists()
    assert run("inspect", tmp_path / "none.pt") == 2 and "does not exist" in capsys.readouterr().err
    assert run("cast", source, tmp_path / "b.pt", "--dtype", "int8") == 2
    assert "dtype: expected one of bfloat16" in capsys.readouterr().err
    assert run("cast", source, tmp_path / "b.pt", "--dtype", "original") == 2
    assert "does not say which dtypes it had" in capsys.readouterr().err
    assert run("cast", source, tmp_path / "b.xyz", "--dtype", "bf16") == 2 and not (tmp_path / "b.pt").exists()


def _pickled(obj) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


@pytest.mark.parametrize("ending", [".safetensors", ".msgpack", ".orbax"])
def test_bad_input_of_other_formats(tmp_path, ending, capsys):
    need(ending)
    good = tmp_path / f"good{ending}"
    C.write(good, C.read(save(tmp_path / "a.pt", {"w": torch.randn(1000)})))
    bad = tmp_path / f"bad{ending}"
    if ending == ".orbax":
        bad.mkdir()
    else:
        bad.write_bytes(good.read_bytes()[:-100])
    (tmp_path / f"foreign{ending}").write_bytes(b"hello world " * 100)
    for name in ("bad", "foreign"):
        assert run("inspect", tmp_path / f"{name}{ending}") == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {tmp_path}/{name}{ending}") and len(err.strip().splitlines()) == 1
    if ending == ".msgpack":
        bad.write_bytes(good.read_bytes() + b"more")
        assert run("inspect", bad) == 2 and "more data after the end" in capsys.readouterr().err


def test_names_that_clash(tmp_path):
    need(".msgpack", ".orbax")
    state = {"a": torch.ones(1), "a.b": torch.ones(1), "a.b.c": torch.ones(1), "_x": torch.ones(1)}
    ckpt = C.read(save(tmp_path / "a.pt", state))
    with pytest.raises(C.CheckpointError, match="nested maps: a.b, a.b.c"):
        C.write(tmp_path / "a.msgpack", ckpt)
    with pytest.raises(C.CheckpointError, match="underscore: _x"):
        C.write(tmp_path / "a.orbax", ckpt)
    with pytest.raises(C.CheckpointError, match="without elements: e"):
        C.write(tmp_path / "a.orbax", C.Checkpoint({"e": torch.zeros(0)}))
    assert os.listdir(tmp_path) == ["a.pt"]


def test_never_over_the_input(tmp_path, capsys):
    source = pathlib.Path(save(tmp_path / "a.pt"))
    os.symlink(source, tmp_path / "link.pt")
    os.link(source, tmp_path / "hard.pt")
    before = source.read_bytes()
    for target in (source, tmp_path / "link.pt", tmp_path / "hard.pt", tmp_path / "x" / ".." / "a.pt"):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert run("cast", source, target, "--dtype", "bf16") == 2
        assert "is the input" in capsys.readouterr().err and source.read_bytes() == before
    need(".orbax")
    C.write(tmp_path / "a.orbax", C.read(source))
    assert run("cast", tmp_path / "a.orbax", tmp_path / "a.orbax" / "b.pt", "--dtype", "bf16") == 2
    assert "is the input" in capsys.readouterr().err
    os.rename(source, tmp_path / "a.orbax" / "c.pt")
    assert run("convert", tmp_path / "a.orbax" / "c.pt", tmp_path / "a.orbax") == 2
    assert "is the input" in capsys.readouterr().err and (tmp_path / "a.orbax" / "c.pt").exists()


def test_target_is_replaced_whole(tmp_path):
    need(".orbax")
    ckpt = C.read(save(tmp_path / "a.pt", {"w": torch.randn(3)}))
    for ending in (".pt", ".orbax"):
        for _ in range(2):
            C.write(tmp_path / f"b{ending}", ckpt)
        assert same(C.read(tmp_path / f"b{ending}").arrays, ckpt.arrays)
    os.symlink("b.pt", tmp_path / "link.pt")
    C.write(tmp_path / "link.pt", C.Checkpoint({"v": torch.ones(1)}))
    assert (tmp_path / "link.pt").is_symlink() and list(C.read(tmp_path / "b.pt").arrays) == ["v"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.orbax", "b.pt", "link.pt"]


def test_read_only_targets(tmp_path, capsys):
    source, target = save(tmp_path / "a.pt"), tmp_path / "b.pt"
    target.write_text("old")
    target.chmod(0o444)
    assert run("cast", source, target, "--dtype", "bf16") == 2
    assert "read-only" in capsys.readouterr().err and target.read_text() == "old"
    assert run("cast", source, "/proc/b.pt", "--dtype", "bf16") == 2
    assert "cannot write /proc/b.pt" in capsys.readouterr().err
    assert run("cast", source, tmp_path / "no" / "b.pt", "--dtype", "bf16") == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("ending", NEEDS)
def test_full_disk_leaves_the_old_file(tmp_path, ending, capsys):
    need(ending)
    source, target = save(tmp_path / "a.pt", {"w": torch.randn(1 << 18)}), tmp_path / f"b{ending}"
    C.write(target, C.Checkpoint({"old": torch.ones(1)}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # writing more than this fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        code = run("convert", source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2 and f"cannot write {target}" in capsys.readouterr().err
    assert list(C.read(target).arrays) == ["old"] and sorted(os.listdir(tmp_path)) == ["a.pt", f"b{ending}"]


def test_kill_while_writing_leaves_the_old_file(tmp_path):
    source, target = save(tmp_path / "a.pt", {"w": torch.randn(1 << 16)}), tmp_path / "b.pt"
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
    with subprocess.Popen(args, stdout=subprocess.PIPE, env=env(), text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.kill()
    assert target.read_text() == "old"
    C.cast_file(source, target, "bf16")  # what the killed one left does not disturb
    assert C.read(target).arrays["w"].dtype == BF16


def test_failure_between_the_two_renames_brings_the_old_directory_back(tmp_path, monkeypatch):
    need(".orbax")
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
    source = save(tmp_path / "a.pt")
    for module in ("safetensors", "msgpack", "orbax", "orbax.checkpoint", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.safetensors").write_bytes(b"x")
    assert run("inspect", tmp_path / "a.safetensors") == 2
    assert "pip install 'returnn_upcast[safetensors]'" in capsys.readouterr().err
    for ending in (".msgpack", ".orbax"):
        assert run("convert", source, tmp_path / f"b{ending}") == 2
        assert "pip install 'returnn_upcast[jax]'" in capsys.readouterr().err
    assert run("cast", source, tmp_path / "b.pt", "--dtype", "bf16") == 0  # all else works without
    script = (
        "import sys, torch\n"
        "sys.modules['ml_dtypes'] = None\n"
        "from returnn_upcast import checkpoint as C\n"
        "assert not {'jax', 'flax', 'orbax', 'safetensors', 'msgpack'} & set(sys.modules)\n"
        "C.to_flax({'': 'rf.Linear'}, {'weight': torch.ones(2, 2)})\n"
        "try: C.to_flax({'': 'rf.Linear'}, {'weight': torch.ones(2, 2, dtype=torch.bfloat16)})\n"
        "except ImportError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=env(), text=True, check=True, capture_output=True)
    assert "pip install 'returnn_upcast[jax]'" in done.stdout
