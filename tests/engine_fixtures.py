"""
The fixture that the tests of RETURNN's engine and frontend share.
"""

from __future__ import annotations
import pytest
import torch


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch):
    """no compilation, neither ours nor that of RETURNN's own rotation"""
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    with torch._dynamo.config.patch(disable=True):
        yield
