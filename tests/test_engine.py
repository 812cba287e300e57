"""
What RETURNN's engine and frontend do around the ops: scaled gradients, accumulation, stopped gradients, recurrent layers,
search by single steps, checkpoints of stock runs, data loaders in other processes.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Tuple
import os
import pathlib
import re
import subprocess
import sys
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend.decoder.transformer import TransformerDecoder

from returnn.tensor import Dim, single_step_dim
import returnn_upcast
from audit_models import write_config
from common import MODES, seq_dim, set_parameters, setting, tensor, values
from engine_models import sequences, train
from tolerances import relative_error

ROOT = pathlib.Path(__file__).resolve().parent.parent
LENS = (7, 5, 9, 3)
BF16, F16 = {"torch_amp": "bfloat16", "grad_scaler": None}, {"torch_amp": "float16", "grad_scaler": None}
PRECISIONS = {"amp": BF16, "bf16": {"default_float_dtype": "bfloat16"}}


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch):
    """no compilation, neither ours nor that of RETURNN's own rotation"""
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    with torch._dynamo.config.patch(disable=True):
        yield


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


# Stopped gradients.

batch, feat, vocab = Dim(3, name="batch"), Dim(16, name="feat"), Dim(11, name="vocab")
time, label_time = seq_dim("time", (7, 5, 6), batch), seq_dim("label_time", (2, 1, 2), batch)
labels = values(3, 2, seed=9).abs().mul(3).int() + 1


def _attention(x: rf.Tensor) -> rf.Tensor:
    keys, _ = rf.replace_dim(x, in_dim=time, out_dim=seq_dim("keys", (7, 5, 6), batch))
    return rf.dot_attention(x, keys, keys, key_dim=feat, axis=keys.dims[1], att_dropout=0.0)


def _ctc(x: rf.Tensor) -> rf.Tensor:
    targets = rf.convert_to_tensor(labels, dims=[batch, label_time], sparse_dim=feat)
    return rf.ctc_loss(logits=x, targets=targets, input_spatial_dim=time, targets_spatial_dim=label_time, blank_index=0)


def _cross_entropy(x: rf.Tensor) -> rf.Tensor:
    targets = rf.convert_to_tensor(torch.ones(3, 7, dtype=torch.int32), dims=[batch, time], sparse_dim=feat)
    return rf.cross_entropy(estimated=x, target=targets, axis=feat, estimated_type="logits")


# of x [batch, time, feat]; the modules are made at the call
COVERED: Dict[str, Callable[[rf.Tensor], rf.Tensor]] = {
    "layer_norm": lambda x: rf.LayerNorm(feat)(x),
    "rms_norm": lambda x: rf.RMSNorm(feat)(x),
    "group_norm": lambda x: rf.GroupNorm(feat, num_groups=4)(x),
    "batch_norm": lambda x: rf.BatchNorm(feat, use_mask=True)(x),
    "normalize": lambda x: rf.normalize(x, axis=feat),
    "attention": _attention,
    "rope": lambda x: rf.RotaryPosSelfAttention(
        feat, feat, key_dim_total=feat, value_dim_total=feat, num_heads=2, att_dropout=0.0
    )(x, axis=time),
    "cross_entropy": _cross_entropy,
    "ctc_loss": _ctc,
    "upcast.log_softmax": lambda x: rf.upcast.log_softmax(x, axis=feat),
}


@pytest.mark.parametrize("name", COVERED)
def test_stop_gradient_scope(name: str):
    """Nothing made within the scope has a gradient, and the same outside has one."""
    with setting("on", MODES["bf16"]):
        raw = values(3, 7, 16, seed=1).bfloat16().requires_grad_()
        x = tensor(raw, batch, time, feat, feature_dim=feat)

        def call() -> rf.Tensor:
            rf.set_random_seed(1)  # the parameters
            return COVERED[name](x)

        with rf.stop_gradient_scope():
            stopped = call()
        stopped_by_op = rf.stop_gradient(call())
        open_ = call()
    assert not stopped.raw_tensor.requires_grad and not stopped_by_op.raw_tensor.requires_grad
    assert stopped.raw_tensor.grad_fn is None and torch.equal(stopped.raw_tensor, open_.raw_tensor)
    (open_.raw_tensor.float().sum() + stopped.raw_tensor.float().sum()).backward()
    assert raw.grad is not None and raw.grad.abs().max() > 0


# Recurrent layers beside the ops.


@pytest.mark.parametrize("mode", ["bf16", "amp-bf16"])
def test_lstm_beside(mode: str):
    """The policy changes the norm and nothing of the LSTM, in inference over a sequence and by single steps."""
    results = {}
    for name in ("stock", "on"):
        with setting(name, MODES[mode]), torch.no_grad():
            rf.init_forward_step_run_ctx()
            lstm, norm = rf.LSTM(feat, feat), rf.RMSNorm(feat)
            params = {
                n: values(*p.raw_tensor.shape, seed=i, std=0.3) for i, (n, p) in enumerate(lstm.named_parameters())
            }
            set_parameters(lstm, params)
            x = tensor(values(3, 7, 16, seed=1).to(MODES[mode].param_dtype), batch, time, feat, feature_dim=feat)
            out, state = lstm(x, state=lstm.default_initial_state(batch_dims=[batch]), spatial_dim=time)
            step = tensor(x.copy_compatible_to_dims_raw([batch, time, feat])[:, 0], batch, feat, feature_dim=feat)
            single, _ = lstm(step, state=state, spatial_dim=single_step_dim)
            low = rf.cast(out, "bfloat16")
            results[name] = [t.raw_tensor.clone() for t in (out, state.h, state.c, single, norm(low))]
    for stock, on in zip(results["stock"][:-1], results["on"][:-1]):
        assert stock.dtype == on.dtype and torch.equal(stock, on)
    assert not torch.equal(results["stock"][-1], results["on"][-1])


# Search: a prompt, then single steps with the state.

SELF_ATT = {
    "sinusoidal": {},
    "rotary": {"pos_enc": None, "layer_opts": {"self_att": rf.RotaryPosCausalSelfAttention}},
    "rel_pos": {"pos_enc": None, "layer_opts": {"self_att": rf.RelPosCausalSelfAttention}},
}
PROMPT, STEPS = 300, 8  # the last positions are not representable in bf16


def _decoder(kind: str, dtype: torch.dtype) -> rf.Module:
    opts = {"num_layers": 2, "num_heads": 2, "dropout": 0.0, "att_dropout": 0.0, **SELF_ATT[kind]}
    with rf.set_default_float_dtype_ctx(str(dtype).split(".")[1]):
        decoder = TransformerDecoder(None, vocab, feat, ff_dim=Dim(32, name="ff"), **opts)
    for i, (name, param) in enumerate(decoder.named_parameters()):
        raw = values(*param.raw_tensor.shape, seed=20 + i, std=0.3, mean=1.0 if name.endswith("scale") else 0.0)
        # exact in all dtypes, so that all have the same parameters
        param.raw_tensor.data.copy_(raw.to(torch.bfloat16))
    return decoder


@torch.no_grad()
def _search(kind: str, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
    """:return: logits [batch, step, vocab] of the last positions: all at once, by single steps"""
    rf.init_forward_step_run_ctx()
    decoder = _decoder(kind, dtype)
    label = torch.randint(0, 11, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    sparse = lambda raw, *dims: rf.convert_to_tensor(raw, dims=[batch, *dims], sparse_dim=vocab)
    full_dim, prompt_dim = Dim(PROMPT + STEPS, name="full"), Dim(PROMPT, name="prompt")
    initial = lambda: decoder.default_initial_state(batch_dims=[batch])
    full, _ = decoder(sparse(label, full_dim), spatial_dim=full_dim, state=initial())
    _, state = decoder(sparse(label[:, :PROMPT], prompt_dim), spatial_dim=prompt_dim, state=initial())
    steps = []
    for pos in range(PROMPT, PROMPT + STEPS):
        logits, state = decoder(sparse(label[:, pos]), spatial_dim=single_step_dim, state=state)
        assert logits.dtype == str(dtype).split(".")[1]
        steps.append(logits.copy_compatible_to_dims_raw([batch, vocab]))
    full = full.copy_compatible_to_dims_raw([batch, full_dim, vocab])[:, PROMPT:]
    return full.double(), torch.stack(steps, 1).double()


@pytest.mark.parametrize("kind", SELF_ATT)
@pytest.mark.parametrize("mode", ["bf16", "f16"])
def test_single_steps_of_search(mode: str, kind: str):
    """Single steps differ from the full sequence by no more than that does from float64, and stock is further from it."""
    dtype, errors = MODES[mode].low, {}
    with setting("stock", dtype=torch.float64):
        reference, reference_steps = _search(kind, torch.float64)
    assert relative_error(reference_steps, reference) < 1e-10
    for name in ("stock", "on"):
        with setting(name, MODES[mode]):
            full, steps = _search(kind, dtype)
        errors[name] = relative_error(full, reference), relative_error(steps, reference), relative_error(steps, full)
    full, steps, difference = errors["on"]
    assert difference <= full and steps <= 1.1 * full, errors
    assert steps < 0.75 * errors["stock"][1], errors


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
