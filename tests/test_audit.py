"""
The audit as a library: that it names what is wrong, and that its figures are right.
"""

from __future__ import annotations
from typing import Any
import math
import pathlib
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
import audit_models
from audit_cases import plain_ops, run_audit  # noqa: F401, an autouse fixture
from audit_models import Norms, Positions, Step
import returnn_upcast
from returnn_upcast import audit
from returnn_upcast.audit import setup as audit_setup, variants, verdict
from returnn_upcast.hooks import norm as norm_hooks
from returnn_upcast.policy import UpcastPolicy


def _line_number(text: str) -> int:
    lines = pathlib.Path(audit_models.__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


# What it must name.


def test_rms_norm_zeros_in_float16():
    report = run_audit("float16", scale=400.0)
    first = report.verdict[0]
    assert first.startswith("rms_norm at body.first: ") and "square overflows in float16" in first and "zero" in first
    site = next(s for s in report.sites if s.path == "body.first")
    assert site.stock_zeros > 0.9 * site.elements and site.upcast_error < 1.01 * site.floor
    assert site.max_input > 400 and site.limit == 65504
    assert report.effect and report.variant("off").gradient_error > 0.9 > 0.01 > report.variant("on").gradient_error


@pytest.mark.parametrize("dtype, length, exact", [("bfloat16", 300, "256"), ("float16", 2_100, "2,048")])
def test_positions(dtype: str, length: int, exact: str):
    report = run_audit(dtype, lambda _: Positions(), lens=(length, 20))
    first = report.verdict[0]
    assert first.startswith("positional_encoding at body: ") and f"only up to {exact}" in first and dtype in first
    site = next(s for s in report.sites if s.op == "positional_encoding")
    assert site.max_input == length - 1 and site.upcast_error < 1.01 * site.floor < 0.01 < 0.05 < site.stock_error


def test_positions_that_fit():
    report = run_audit("bfloat16", lambda _: Positions(), lens=(30, 20))
    assert not any("positional_encoding" in line and "collide" in line for line in report.verdict)


def test_ctc_crash_in_float16():
    report = run_audit("float16", loss="ctc")
    first = report.verdict[0]
    assert first.startswith("Stock fails with ") and "in ctc_loss at (step)" in first and "Half" in first
    off, on = report.variant("off"), report.variant("on")
    assert off.error.split(":")[0] in off.traceback and "Half" in off.error
    assert on.error is None and on.gradient_error < 0.01
    assert report.variant("on without ctc_loss").error and not report.variant("on without rms_norm").error
    site = next(s for s in report.sites if s.op == "ctc_loss")
    assert site.stock_exception and site.upcast_error < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_log_probs(dtype: str):
    report = run_audit(dtype, loss="log-probs")
    line = f"audit_models.py:{_line_number('the line that rounds')}"
    text = next(x for x in report.verdict[:2] if "log-probs were rounded" in x)
    assert text.startswith("cross_entropy at (step)") and dtype in text and line in text
    assert "rf.upcast.log_softmax" in text


def test_float32_log_probs_are_fine():
    assert not any(s.lost_before for s in run_audit("bfloat16", loss="float32-log-probs").sites)


class _Custom(rf.Module):
    def __init__(self, feat: Dim, low: bool = True):
        super().__init__()
        self.norm, self.feat, self.linear, self.low = rf.LayerNorm(feat), feat, rf.Linear(feat, feat), low

    def __call__(self, x: Any) -> Any:
        x = self.linear(x)
        if not self.low:
            return self.norm(rf.cast(x - rf.reduce_mean(rf.cast(x, "float32"), axis=self.feat), x.dtype))
        return self.norm(x - rf.reduce_mean(x, axis=self.feat))  # rounded statistics


def test_norm_of_rounded_statistics():
    site = next(s for s in run_audit("bfloat16", _Custom).sites if s.op == "layer_norm")
    number = next(i for i, x in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if "# rounded stat" in x)
    assert "statistics" in site.lost_before and site.lost_line.endswith(f"test_audit.py:{number}")
    for body in (Norms, lambda feat: _Custom(feat, low=False)):
        assert not any(s.lost_before for s in run_audit("bfloat16", body).sites)


class _Linear(rf.Module):
    def __init__(self, feat: Dim):
        super().__init__()
        self.linear = rf.Linear(feat, feat)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def test_no_effect():
    report = run_audit("float32")
    assert report.verdict[0].startswith("No effect on this model") and "no low precision" in report.verdict[0]
    assert not report.effect and not report.variants and report.sites

    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(_Linear)
        square = lambda *, model, extern_data: rf.reduce_sum(
            rf.square(model(extern_data["x"], step.time)), axis=[step.batch, step.time, step.vocab]
        )
        report = audit.audit_step(step.model, square, [step.data])
    assert "calls none of the ops" in report.verdict[0] and not report.effect


# That the figures are right.


@pytest.mark.parametrize("size", [0.03, 0.3])
def test_planted_error_of_an_op(size: float, monkeypatch):
    original = norm_hooks.rms_norm

    def planted(original_call: Any, self: rf.RMSNorm, x: Any) -> Any:
        out = original(original_call, self, x)
        return out * (1 + size) if self is step.model.body.second else out

    monkeypatch.setattr(norm_hooks, "rms_norm", planted)
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)
        report = audit.audit_step(step.model, step, [step.data])
    errors = {s.path: s.upcast_error for s in report.sites if s.op == "rms_norm"}
    assert errors["body.second"] == pytest.approx(size, rel=0.1)
    assert errors["body.first"] < 0.003


def test_planted_error_of_a_gradient():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)
        scale = step.model.body.second.scale.raw_tensor
        scale.register_hook(lambda grad: grad * 1.25 if grad.dtype == torch.bfloat16 else grad)
        on = audit.audit_step(step.model, step, [step.data]).variant("on")
    worst = on.worst_params[0]
    assert worst.name == "body.second.scale" and worst.error == pytest.approx(0.25, rel=0.1)
    assert on.gradient_error == pytest.approx(0.25 * worst.share, rel=0.1)
    assert all(p.error < 0.05 for p in on.worst_params[1:])


@pytest.mark.parametrize("reference", ["float32", "float64"])
def test_gradient_error_against_plain_code(reference: str):
    """the reference by hand: logits after one linear layer, and cross entropy, in float64"""
    report = run_audit("bfloat16", _Linear, reference=reference)
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(_Linear)
        assert not rf.get_run_ctx().losses
        returnn_upcast.install()
        with returnn_upcast.scope(True):
            step(model=step.model, extern_data=step.data)
            rf.get_run_ctx().total_loss().raw_tensor.backward()
    params = {name: p.raw_tensor for name, p in step.model.named_parameters()}
    got = torch.cat([p.grad.double().flatten() for p in params.values()])

    own = {name: p.detach().double().requires_grad_() for name, p in params.items()}
    x = step.data["x"].raw_tensor.double()
    for layer in ("body.linear", "logits"):
        x = x @ own[f"{layer}.weight"] + own[f"{layer}.bias"]
    mask = torch.arange(7)[None] < torch.tensor(audit_models.LENS)[:, None]
    loss = torch.nn.functional.cross_entropy(x[mask], step.data["y"].raw_tensor[mask].long())
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in own.values()])

    on = report.variant("on")
    assert on.gradient_error == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-3)
    assert on.losses[0].reference == pytest.approx(float(loss.detach()), rel=1e-6)


def test_site_error_against_plain_code():
    site = next(s for s in run_audit("bfloat16").sites if s.path == "body.first")
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)
    mask = torch.arange(7)[None] < torch.tensor(audit_models.LENS)[:, None]
    x = step.data["x"].raw_tensor.double()[mask]
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert site.floor == pytest.approx(float((want.bfloat16().double() - want).norm() / want.norm()), rel=1e-3)
    assert site.upcast_error == pytest.approx(site.floor, rel=1e-3)
    assert site.max_input == float(x.abs().max()) and site.elements == x.numel()
    assert (site.dtypes_in, site.dtype_inside, site.dtype_out) == (["bfloat16"], "float32", "bfloat16")


def test_dropout_is_noise_and_not_error():
    with_dropout = run_audit("bfloat16", lambda feat: Norms(feat, dropout=0.3))
    without = run_audit("bfloat16")
    assert [n.kind for n in without.noise] == ["order"]
    assert [n.kind for n in with_dropout.noise] == ["dropout", "order"]
    assert with_dropout.noise[0].gradient > 0.1
    assert with_dropout.variant("on").gradient_error == without.variant("on").gradient_error


def test_opt_in_ops_of_the_config_stay_on():
    policies = variants.make_policies(
        audit_setup.Setup(torch.nn.Linear(1, 1), print, [], []),
        UpcastPolicy(frozenset(["softmax"])),
        {"rms_norm", "softmax"},
    )
    assert "softmax" in policies["on"] and "softmax" not in policies["off"]
    assert set(policies) == {"off", "on", "on without rms_norm", "on without softmax"}


def _variant(*errors: float) -> audit.Variant:
    mean = sum(errors) / len(errors)
    return audit.Variant("on", [], gradient_error=mean, batch_errors=list(errors))


@pytest.mark.parametrize(
    "before, after, value, significant",
    [
        ([1.0, 1.0, 1.0], [0.5, 0.51, 0.49], 0.5, True),
        ([1.0, 1.0, 1.0], [0.5, 1.3, 0.9], 0.1, False),
        ([1.0, 1.0, 1.0], [0.99, 0.99, 0.99], 0.01, False),
        ([1.0, 1.0, 1.0], [1.3, 1.3, 1.3], -0.3, True),
        ([1.0], [0.95], 0.05, False),
        ([1.0], [0.8], 0.2, True),
        ([math.inf], [0.8], math.inf, True),
        ([0.8], [math.inf], -math.inf, True),
        ([0.0], [0.0], 0.0, False),
    ],
)
def test_gain_or_chance(before, after, value: float, significant: bool):
    found = verdict.gain(_variant(*before), _variant(*after))
    assert found == (pytest.approx(value, abs=1e-6), significant)


def test_loss_scale_changes_nothing():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        errors = []
        for scale in (1.0, 1024.0):
            step = Step(Norms)
            report = audit.audit_step(step.model, step, [step.data], loss_scale=scale)
            errors.append(report.variant("on").gradient_error)
    assert errors[0] == errors[1] < 0.02
