"""
The audit as a library: that its figures are right, that it names what is wrong, and that it leaves nothing behind.
"""

from __future__ import annotations
from typing import Any, Dict
import contextlib
import json
import math
import pathlib
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from returnn.torch.frontend._backend import TorchBackend
import audit_models
from audit_models import Norms, Positions, Step
from common import tensor
import returnn_upcast
from returnn_upcast import audit, hooks
from returnn_upcast.audit import autocast, html, plots, run, setup as audit_setup, table, training, variants, verdict
from returnn_upcast.hooks import norm as norm_hooks
from returnn_upcast.policy import UpcastPolicy


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch):
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")


def _audit(dtype: str, body: Any = Norms, **kwargs: Any) -> audit.AuditReport:
    options = {key: kwargs.pop(key) for key in ("autocast", "reference") if key in kwargs}
    with rf.set_default_float_dtype_ctx(dtype):
        step = Step(body, **kwargs)
        return audit.audit_step(step.model, step, [step.data], **options)


def _line_number(text: str) -> int:
    lines = pathlib.Path(audit_models.__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


# What it must name.


def test_rms_norm_zeros_in_float16():
    report = _audit("float16", scale=400.0)
    first = report.verdict[0]
    assert first.startswith("rms_norm at body.first: ") and "square overflows in float16" in first and "zero" in first
    site = next(s for s in report.sites if s.path == "body.first")
    assert site.stock_zeros > 0.9 * site.elements and site.upcast_error < 1.01 * site.floor
    assert site.max_input > 400 and site.limit == 65504
    assert report.effect and report.variant("off").gradient_error > 0.9 > 0.01 > report.variant("on").gradient_error


@pytest.mark.parametrize("dtype, length, exact", [("bfloat16", 300, "256"), ("float16", 2_100, "2,048")])
def test_positions(dtype: str, length: int, exact: str):
    report = _audit(dtype, lambda _: Positions(), lens=(length, 20))
    first = report.verdict[0]
    assert first.startswith("positional_encoding at body: ") and f"only up to {exact}" in first and dtype in first
    site = next(s for s in report.sites if s.op == "positional_encoding")
    assert site.max_input == length - 1 and site.upcast_error < 1.01 * site.floor < 0.01 < 0.05 < site.stock_error


def test_positions_that_fit():
    report = _audit("bfloat16", lambda _: Positions(), lens=(30, 20))
    assert not any("positional_encoding" in line and "collide" in line for line in report.verdict)


def test_ctc_crash_in_float16():
    report = _audit("float16", loss="ctc")
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
    report = _audit(dtype, loss="log-probs")
    line = f"audit_models.py:{_line_number('the line that rounds')}"
    text = next(x for x in report.verdict[:2] if "log-probs were rounded" in x)
    assert text.startswith("cross_entropy at (step)") and dtype in text and line in text
    assert "rf.upcast.log_softmax" in text


def test_float32_log_probs_are_fine():
    assert not any(s.lost_before for s in _audit("bfloat16", loss="float32-log-probs").sites)


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
    site = next(s for s in _audit("bfloat16", _Custom).sites if s.op == "layer_norm")
    number = next(i for i, x in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if "# rounded stat" in x)
    assert "statistics" in site.lost_before and site.lost_line.endswith(f"test_audit.py:{number}")
    for body in (Norms, lambda feat: _Custom(feat, low=False)):
        assert not any(s.lost_before for s in _audit("bfloat16", body).sites)


class _Linear(rf.Module):
    def __init__(self, feat: Dim):
        super().__init__()
        self.linear = rf.Linear(feat, feat)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def test_no_effect():
    report = _audit("float32")
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
    report = _audit("bfloat16", _Linear, reference=reference)
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
    site = next(s for s in _audit("bfloat16").sites if s.path == "body.first")
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
    with_dropout = _audit("bfloat16", lambda feat: Norms(feat, dropout=0.3))
    without = _audit("bfloat16")
    assert [n.kind for n in without.noise] == ["order"]
    assert [n.kind for n in with_dropout.noise] == ["dropout", "order"]
    assert with_dropout.noise[0].gradient > 0.1
    assert with_dropout.variant("on").gradient_error == without.variant("on").gradient_error


# That it leaves nothing behind.


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


# Views.


def test_json_has_the_documented_schema():
    for report in (_audit("float16", scale=400.0), _audit("float32"), _audit("float16", loss="ctc")):
        data = json.loads(report.to_json(), parse_constant=lambda x: pytest.fail(x))
        _validate(data, audit.json_schema(), "report")
    assert "inf" in json.dumps(data["sites"])


def _validate(value: Any, schema: Dict[str, Any], where: str):
    if "anyOf" in schema:
        assert any(_fits(value, option) for option in schema["anyOf"]), (where, value)
        return _validate(value, next(option for option in schema["anyOf"] if _fits(value, option)), where)
    assert _fits(value, schema), (where, value, schema)
    if schema.get("type") == "object" and "properties" in schema:
        assert set(value) == set(schema["properties"]), where
        for key, x in value.items():
            _validate(x, schema["properties"][key], f"{where}.{key}")
    elif schema.get("type") == "object":
        for key, x in value.items():
            _validate(x, schema["additionalProperties"], f"{where}.{key}")
    elif schema.get("type") == "array":
        for x in value:
            _validate(x, schema["items"], f"{where}[]")


def _fits(value: Any, schema: Dict[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if isinstance(value, bool):
        return schema["type"] == "boolean"
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    return isinstance(value, kinds[schema["type"]]) if schema["type"] in kinds else False


@pytest.mark.parametrize("width", [50, 80, 120, 200])
def test_table_fits(width: int):
    report = _audit("float16", loss="ctc")
    text = table.render(report, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("* Stock fails with") and "body.first" in text


def test_page_and_pictures():
    pytest.importorskip("matplotlib")
    report = _audit("float16", scale=400.0)
    report.name = "<script>"
    page = html.page(report)
    assert page.count("data:image/svg+xml;base64,") == len(plots.pictures(report)) == 3
    assert "<script" not in page and "<link" not in page and "src='http" not in page and "body.first" in page
    assert plots.overview(report).startswith(b"\x89PNG") and plots.overview(_audit("float32")).startswith(b"\x89PNG")
    assert "No effect" in html.page(_audit("float32"))


def test_autocast_lists():
    found = autocast.behavior(torch.bfloat16, "cpu")
    assert found["cuda"]["layer_norm"] == found["cuda"]["log_softmax"] == "float32"
    assert found["cuda"]["matmul"] == found["cuda"]["mean"] == found["cpu"]["layer_norm"] == "bfloat16"
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


# Bad input.


def test_step_that_fails():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)
        wrong = lambda *, model, extern_data: {}["no_such_key"]
        with pytest.raises(audit.StepError, match="variant 'on': KeyError: 'no_such_key'") as info:
            audit.audit_step(step.model, wrong, [step.data])
        assert "no_such_key" in info.value.trace and "returnn_upcast/audit" not in info.value.trace

        def no_float32(*, model, extern_data):
            assert extern_data["x"].dtype == "bfloat16", "only bfloat16 here"
            step(model=model, extern_data=extern_data)

        with pytest.raises(audit.StepError, match="variant 'reference': AssertionError: only bfloat16 here"):
            audit.audit_step(step.model, no_float32, [step.data])
        with pytest.raises(audit.StepError, match="marks no loss"):
            audit.audit_step(step.model, lambda *, model, extern_data: None, [step.data])
    assert not hooks.is_installed() and not hasattr(rf, "upcast")


def test_arguments():
    step = Step(Norms)
    with pytest.raises(ValueError, match="batches is empty"):
        audit.audit_step(step.model, step, [])
    with pytest.raises(ValueError, match="reference must be one of float32, float64, got 'bfloat16'"):
        audit.audit_step(step.model, step, [step.data], reference="bfloat16")


def test_single_sequence():
    report = _audit("bfloat16", lens=(5,))
    assert report.variant("on").error is None and report.variant("on").gradient_error > 0


def test_out_of_memory_in_the_reference():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        steps = {n: Step(Norms, lens=(7, 5, 6, 4)[:n]) for n in (4, 2, 1)}
        seen = []

        def step(*, model, extern_data):
            n = extern_data["x"].raw_tensor.shape[0]
            seen.append(n)
            if n > 1 and extern_data["x"].dtype == "float32":
                raise torch.OutOfMemoryError("no memory")
            steps[n](model=model, extern_data=extern_data)

        batch = lambda n: audit_setup.fixed_batch(steps[n].data)
        left = [2, 1]
        setup = audit_setup.Setup(steps[4].model, step, [batch(4)], ["4 sequences"], float_dtype=torch.bfloat16)
        for n in (2, 1):
            steps[n].feat, steps[n].vocab = steps[4].feat, steps[4].vocab
            steps[n].data = _with_feat(steps[n], steps[4])

        def halve(_i):
            n = left.pop(0) if left else None
            return n and (batch(n), f"{n} sequences")

        setup.halve = halve
        report = run.audit(setup, name="test")
    assert seen.count(4) == 2 and report.batches == ["1 sequences"] and report.variant("on").gradient_error > 0
    assert [n for n in report.notes if "half of the sequences (2 sequences)" in n]

    setup.halve = lambda _i: None
    setup.batches = [batch(4)]
    with rf.set_default_float_dtype_ctx("bfloat16"), pytest.raises(audit.StepError, match="'reference': OutOfMemory"):
        run.audit(setup, name="test")


def _with_feat(step: Step, other: Step) -> Any:
    x, y = step.data["x"], step.data["y"]
    step.data.data["x"] = tensor(x.raw_tensor, step.batch, step.time, other.feat, feature_dim=other.feat)
    step.data.data["y"] = rf.convert_to_tensor(y.raw_tensor, dims=[step.batch, step.time], sparse_dim=other.vocab)
    return step.data


@pytest.mark.parametrize("value, every", [(None, None), (False, None), ({"every": 10}, 10), ("{'every': 3}", 3)])
def test_option(value: Any, every: Any):
    assert training.parse(value) == every


@pytest.mark.parametrize(
    "value, words",
    [(True, "expected a dict"), ({"evry": 1}, "expected a dict"), ({"every": 0}, "at least 1"), ("x", "cannot read")],
)
def test_option_errors(value: Any, words: str):
    with pytest.raises((TypeError, ValueError), match=f"rf_upcast_audit: .*{words}"):
        training.parse(value)


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


def test_packed():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)

        def packed_step(*, model, extern_data):
            packed = {key: rf.pack(extern_data[key], dims=[step.batch, step.time]) for key in "xy"}
            step(model=model, extern_data=packed)

        report = audit.audit_step(step.model, packed_step, [step.data])
    padded = _audit("bfloat16")
    assert not report.notes
    for name in ("off", "on"):
        assert report.variant(name).gradient_error == pytest.approx(padded.variant(name).gradient_error, rel=0.2)
    for a, b in zip(report.sites, padded.sites):
        assert (a.path, a.op, a.elements) == (b.path, b.op, b.elements)
        assert a.upcast_error == pytest.approx(b.upcast_error, rel=1e-3)


def test_torch_module():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8)).bfloat16()
    before = {key: x.clone() for key, x in model.state_dict().items()}

    def step(*, model, extern_data):
        out = rf.convert_to_tensor(model(extern_data["x"]), dims=[Dim(6, name="batch"), vocab])
        target = rf.convert_to_tensor(extern_data["y"], dims=[out.dims[0]], sparse_dim=vocab)
        loss = rf.cross_entropy(estimated=out, target=target, axis=vocab, estimated_type="logits")
        return loss.raw_tensor.sum()

    vocab = Dim(8, name="vocab")
    batch = {"x": torch.randn(6, 8).bfloat16(), "y": torch.arange(6)}
    report = audit.audit_step(model, step, [batch])
    on = report.variant("on")
    assert report.batches == ["6x8"] and on.losses[0].name == "loss" and 0 < on.gradient_error < 0.05
    assert "dropout" in [n.kind for n in report.noise] and model.training and model[1].training
    for key, x in model.state_dict().items():
        assert torch.equal(x, before[key]) and x.dtype == before[key].dtype


def test_loss_scale_changes_nothing():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        errors = []
        for scale in (1.0, 1024.0):
            step = Step(Norms)
            report = audit.audit_step(step.model, step, [step.data], loss_scale=scale)
            errors.append(report.variant("on").gradient_error)
    assert errors[0] == errors[1] < 0.02
