"""
The audit and ``trace`` leave nothing behind: parameters, gradients, statistics, random state and hooks are as before.
"""

from __future__ import annotations
from typing import Any, Dict
import contextlib
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from returnn.torch.frontend._backend import TorchBackend
from audit_cases import plain_ops  # noqa: F401, an autouse fixture
from audit_models import Norms, Positions, Step
import returnn_upcast
from returnn_upcast import audit, hooks


class _BatchNorm(rf.Module):
    def __init__(self, feat: Dim):
        super().__init__()
        self.norm = rf.BatchNorm(feat, use_mask=True)

    def __call__(self, x: Any) -> Any:
        return self.norm(x)


def _state(step: Step) -> Dict[str, Any]:
    return {
        name: (p.raw_tensor, p.dtype, p.raw_tensor.clone(), p.raw_tensor.grad)
        for name, p in step.model.named_parameters()
    }


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_leaves_nothing_behind(dtype: str, installed: bool):
    if installed:
        returnn_upcast.install()
    with rf.set_default_float_dtype_ctx(dtype):
        step = Step(_BatchNorm)
        grad = torch.ones_like(step.model.logits.weight.raw_tensor)
        step.model.logits.weight.raw_tensor.grad = grad
        before, random_state = _state(step), torch.random.get_rng_state()
        calls = [rf.BatchNorm.__call__, rf.cross_entropy, vars(TorchBackend)["ctc_loss"]]
        audit.audit_step(step.model, step, [step.data])
        after = _state(step)
    assert hooks.is_installed() == installed
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert calls == [rf.BatchNorm.__call__, rf.cross_entropy, vars(TorchBackend)["ctc_loss"]]
    for name, (raw, kind, value, old_grad) in before.items():
        assert after[name][0] is raw and after[name][1] == kind and after[name][3] is old_grad
        assert torch.equal(after[name][2], value)
    assert after["logits.weight"][3] is grad


def test_trace_of_a_block(installed):
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)
        plain = step.model(step.data["x"], step.time).raw_tensor
        with audit.trace() as found:
            traced = step.model(step.data["x"], step.time).raw_tensor
        again = step.model(step.data["x"], step.time).raw_tensor
    assert [(s.path, s.op, s.calls) for s in found.sites] == [
        ("body.first", "rms_norm", 1),
        ("body.second", "rms_norm", 1),
    ]
    assert torch.equal(plain, traced) and torch.equal(plain, again) and not found.failures
    assert found.sites[0].line.startswith("tests") or "audit_models.py:" in found.sites[0].line


def test_trace_updates_running_statistics_once(installed):
    with rf.set_default_float_dtype_ctx("bfloat16"):
        found = {}
        for traced in (False, True):
            step = Step(_BatchNorm)
            with audit.trace(step.model) if traced else contextlib.nullcontext():
                step.model(step.data["x"], step.time)
            found[traced] = step.model.body.norm.running_mean.raw_tensor.clone()
    assert torch.equal(found[False], found[True]) and found[True].any()


def test_trace_sees_cached_encodings(installed):
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(lambda _: Positions())
        with audit.trace(step.model) as found:
            for _ in range(2):
                step.model(step.data["x"], step.time)
    assert [(s.op, s.calls) for s in found.sites] == [("positional_encoding", 2)]
