"""
What the tests of the audit share: one audit of a model from audit_models, and ops that are not compiled.
"""

from __future__ import annotations
from typing import Any
import pytest
import returnn.frontend as rf
from audit_models import Norms, Step
from returnn_upcast import audit


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch):
    """the ops are not compiled"""
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")


def run_audit(dtype: str, body: Any = Norms, **kwargs: Any) -> audit.AuditReport:
    """
    :param dtype: default float dtype of the training
    :param body: as for Step
    :param kwargs: autocast and reference go to the audit, all others to Step
    :return: the report on one batch
    """
    options = {key: kwargs.pop(key) for key in ("autocast", "reference") if key in kwargs}
    with rf.set_default_float_dtype_ctx(dtype):
        step = Step(body, **kwargs)
        return audit.audit_step(step.model, step, [step.data], **options)
