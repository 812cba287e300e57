"""
Does it matter for my model? The audit runs the train step in float32, with the upcast off and on, and op by op.

``python -m returnn_upcast audit my.config`` for a config, :func:`audit_step` for a script, :func:`trace` for a block.
"""

from __future__ import annotations
from .report import AuditReport, CallSite, LossResult, Noise, ParamError, Variant, json_schema
from .run import audit_step
from .trace import Trace, trace
from .variants import StepError

__all__ = [
    "AuditReport",
    "CallSite",
    "LossResult",
    "Noise",
    "ParamError",
    "StepError",
    "Trace",
    "Variant",
    "audit_step",
    "json_schema",
    "trace",
]
