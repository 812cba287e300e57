"""
What RETURNN's engine does around the ops: scaled gradients, accumulation, checkpoints of stock runs, data loaders in
other processes.
"""

from __future__ import annotations
from typing import Any, Callable, Dict
import os
import pathlib
import re
import subprocess
import sys
import pytest
import torch
import returnn.frontend as rf
import returnn_upcast
from audit_models import write_config
from engine_fixtures import plain_ops  # noqa: F401, an autouse fixture
from engine_models import sequences, train
from tolerances import relative_error

ROOT = pathlib.Path(__file__).resolve().parent.parent
LENS = (7, 5, 9, 3)
BF16, F16 = {"torch_amp": "bfloat16", "grad_scaler": None}, {"torch_amp": "float16", "grad_scaler": None}
PRECISIONS = {"amp": BF16, "bf16": {"default_float_dtype": "bfloat16"}}


def _upcast(data: Any = LENS, **more: Any) -> Any:
    returnn_upcast.install()
    return train(sequences(data) if isinstance(data, tuple) else data, rf_upcast=True, **more)


# Gradient scaler. The class that RETURNN takes is off without CUDA, so it is put in its place here.


def _scaled(scale: float, **more: Any) -> Any:
    def prepare(engine):
        engine._grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)

    return _upcast(prepare=prepare, **F16, **more)


def _gradient_error(engine: Any, reference: Any) -> float:
    # of the first step, since the parameters differ afterwards
    scale = engine._grad_scaler.get_scale()
    flat = [torch.cat([g.flatten().double() for g in e.grads[0].values()]) for e in (engine, reference)]
    return relative_error(flat[0] / scale, flat[1])


def test_gradient_scaler_in_f16():
    """Gradients below the range of f16 come through with a scale, and not without."""
    small = sequences(LENS[:2], scale=1e-3)
    step = _small_loss(2.0**-20)
    reference = train(small, train_step=step)
    errors = {
        scale: _gradient_error(_scaled(scale, data=small, train_step=step), reference) for scale in (1.0, 2.0**20)
    }
    assert errors[2.0**20] < 5e-3 < errors[1.0], errors


def _small_loss(factor: float) -> Callable:
    def train_step(*, model, extern_data, **_kwargs):
        logits = model(extern_data["data"])
        targets, vocab = extern_data["classes"], extern_data["classes"].sparse_dim
        loss = rf.cross_entropy(estimated=logits, target=targets, axis=vocab, estimated_type="logits")
        (loss * factor).mark_as_loss("ce", use_normalized_loss=True)

    return train_step


def test_gradient_scaler_skips_a_step_that_overflows():
    """An overflow stays one through all backwards of ours: the scaler must see it, halve the scale, and skip the step."""
    huge = _scaled(2.0**40)
    assert huge._grad_scaler.get_scale() == 2.0**36 and len(huge.grads) == 4
    assert not any(torch.isfinite(grads["inner.weight"]).any() for grads in huge.grads)  # below all the others
    fine = _scaled(1.0)
    initial = _upcast(**F16, learning_rate=0.0).parameters()
    weights = [name for name in initial if "running" not in name]
    assert all(torch.equal(huge.parameters()[name], initial[name]) for name in weights)
    assert not any(torch.equal(fine.parameters()[name], initial[name]) for name in weights)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradient_accumulation(precision: str):
    """The gradients of an update are the sums of those of its steps."""
    one = _upcast(learning_rate=0.0, **PRECISIONS[precision])
    two = _upcast(learning_rate=0.0, accum_grad_multiple_step=2, **PRECISIONS[precision])
    assert len(one.grads) == 4 and len(two.grads) == 2 and one.losses == two.losses
    for i, summed in enumerate(two.grads):
        first, second = one.grads[2 * i : 2 * i + 2]
        assert summed.keys() == first.keys()
        for name, grad in summed.items():
            assert grad.dtype == first[name].dtype and torch.equal(grad, first[name] + second[name]), name


# Checkpoints.


def _state(folder: pathlib.Path, epoch: int) -> Dict[str, Any]:
    """:return: dtypes and shapes of everything in the checkpoint, by name"""
    result = {}
    for suffix in (".pt", ".opt.pt"):
        loaded = torch.load(folder / f"model.{epoch:03}{suffix}", weights_only=False)
        stack = [((suffix,), loaded)]
        while stack:
            path, value = stack.pop()
            if isinstance(value, (dict, list)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                stack.extend(((*path, key), item) for key, item in items)
            else:
                is_tensor = isinstance(value, torch.Tensor)
                result[path] = (value.dtype, value.shape) if is_tensor else type(value)
    return result


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_from_stock_and_back(precision: str, tmp_path: pathlib.Path):
    """Stock, upcast, stock, one epoch each: the same names and dtypes in every file, and the training goes on."""
    losses, files = {}, {}
    for name in ("stock", "mixed"):
        folder = tmp_path / name
        folder.mkdir()
        more = {**PRECISIONS[precision], "optimizer": {"class": "adamw"}, "model": str(folder / "model")}
        more.update(learning_rate=2.0**-6, learning_rate_file=str(folder / "scores"), cleanup_old_models=False)
        for epoch in (1, 2, 3):
            returnn_upcast.uninstall()
            if name == "mixed" and epoch == 2:
                engine = _upcast(num_epochs=epoch, **more)
            else:
                engine = train(sequences(LENS), num_epochs=epoch, **more)
            assert len(engine.losses) == len(LENS) and engine.epoch == epoch and engine.global_train_step == 4 * epoch
            losses[name, epoch] = torch.tensor(engine.losses, dtype=torch.float64)
            files[name, epoch] = _state(folder, epoch)
    assert all(state == files["stock", 1] for state in files.values())
    # the same training but for the roundings of epoch 2, and far from a new one
    assert torch.equal(losses["mixed", 1], losses["stock", 1]) and not torch.equal(
        losses["mixed", 2], losses["stock", 2]
    )
    for epoch in (2, 3):
        assert relative_error(losses["mixed", epoch], losses["stock", epoch]) < 2.0**-7
        assert relative_error(losses["stock", epoch], losses["stock", 1]) > 0.1


# Data loaders in other processes.

_LOADER = """
import os
_data = {"class": "Task12AXDataset", "num_seqs": 6, "fixed_random_seed": 1}
if os.environ["WORKERS"] == "yes":
    train = {"class": "MultiProcDataset", "dataset": _data, "num_workers": 1, "buffer_size": 2}
    torch_dataloader_opts = {"num_workers": 1}
else:
    train = _data
    torch_dataloader_opts = {"num_workers": 0}
max_seqs = 2
random_seed = 1
"""


def test_loader_processes(tmp_path: pathlib.Path):
    """The config installs the hooks; RETURNN's dataset processes and torch's loader process get by with it."""
    losses = {}
    for workers in ("no", "yes"):
        folder = tmp_path / workers
        folder.mkdir()
        env = {**os.environ, "WORKERS": workers, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "returnn", write_config(folder, _LOADER)],
            cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        )  # fmt: skip
        log = (folder / "log").read_text()
        assert done.returncode == 0, done.stdout[-5000:]
        assert "rf_upcast: float32 inside for" in log
        losses[workers] = re.findall(r"ep 1 train, step \d+, ce ([^ ,]+),", log)
    assert len(losses["no"]) == 3 and losses["no"] == losses["yes"]
