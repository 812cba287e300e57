"""
What the audit is given: steps that fail or run out of memory, bad options, packed sequences, and plain torch modules.
"""

from __future__ import annotations
from typing import Any
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from audit_cases import plain_ops, run_audit  # noqa: F401, an autouse fixture
from audit_models import Norms, Step
from common import tensor
from returnn_upcast import audit, hooks
from returnn_upcast.audit import run, setup as audit_setup, training


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
    report = run_audit("bfloat16", lens=(5,))
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


def test_packed():
    with rf.set_default_float_dtype_ctx("bfloat16"):
        step = Step(Norms)

        def packed_step(*, model, extern_data):
            packed = {key: rf.pack(extern_data[key], dims=[step.batch, step.time]) for key in "xy"}
            step(model=model, extern_data=packed)

        report = audit.audit_step(step.model, packed_step, [step.data])
    padded = run_audit("bfloat16")
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
