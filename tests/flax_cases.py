"""
What the tests of Flax and JAX share: they are skipped where either is missing, and leave RETURNN on the torch backend.
"""

from __future__ import annotations
import os
import pytest
import returnn.frontend as rf
from returnn.util.basic import BehaviorVersion

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")


@pytest.fixture(autouse=True)
def torch_backend():
    """the torch backend afterwards again"""
    BehaviorVersion._reset((39, 0))
    yield
    rf.select_backend_torch()
