"""
Every test starts with RETURNN as it is installed: torch backend, no config, no behavior version, nothing hooked.
"""

from __future__ import annotations
from typing import Callable, List
import logging
import math
import os
import shutil
import pytest
import torch
import returnn.frontend as rf
from returnn.config import global_config_ctx
from returnn.util.basic import BehaviorVersion
import returnn_upcast
from returnn_upcast import config
from returnn_upcast.ops import attention_native, rows_native

NATIVE = (attention_native.function, rows_native.function)

os.environ.setdefault("OMP_NUM_THREADS", "2")
torch.set_num_threads(2)
rf.select_backend_torch()


@pytest.fixture(autouse=True)
def fresh_returnn():
    """no hooks, no policy, no config, no behavior version, default dtype float32; the same again afterwards"""
    returnn_upcast.uninstall()
    returnn_upcast.set_policy(None)
    BehaviorVersion._reset((None, 16))
    config._logged.clear()
    rf.init_train_step_run_ctx(train_flag=True, step=0)
    with global_config_ctx(None), rf.set_default_float_dtype_ctx("float32"):
        yield
    returnn_upcast.set_policy(None)
    returnn_upcast.uninstall()
    BehaviorVersion._reset((None, 16))


@pytest.fixture
def installed(fresh_returnn):
    """the hooks in place, the policy off"""
    returnn_upcast.install()


@pytest.fixture(params=["blocks", "native"])
def attention_path(request, monkeypatch) -> str:
    """
    :return: what attention on the CPU in low precision runs by, whatever the sizes (where no trace wants the plain ops)
    """
    monkeypatch.setattr(attention_native, "MIN_ENERGIES", 0 if request.param == "native" else math.inf)
    return request.param


@pytest.fixture(params=["torch", "native"])
def rows_path(request, monkeypatch) -> str:
    """:return: what norms and log_softmax over the last axis on the CPU run by, whatever the sizes, as above"""
    monkeypatch.setattr(rows_native, "MIN_NUMEL", 1 if request.param == "native" else math.inf)
    return request.param


@pytest.fixture
def forget_native(monkeypatch) -> Callable[[], None]:
    """:return: function, after which no native code is loaded yet"""

    def forget():
        for function in NATIVE:
            monkeypatch.setattr(function, "_function", None)
            monkeypatch.setattr(function, "_usable", None)

    return forget


@pytest.fixture(params=["no compiler", "failing probe", "option"])
def lose_native(request, forget_native, monkeypatch, caplog) -> Callable[[], Callable[[], List[str]]]:
    """:return: function, after which native code can't be had; it returns one that checks and returns what was logged"""

    def lose():
        forget_native()
        if request.param == "option":
            monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
        elif request.param == "no compiler":
            monkeypatch.setenv("CXX", "/nowhere")
            monkeypatch.setattr(shutil, "which", lambda name: None)
        else:
            for function in NATIVE:
                monkeypatch.setattr(function, "_load", lambda: lambda *args: 1)
        caplog.set_level(logging.DEBUG, "returnn.frontend.upcast")
        return logged

    def logged() -> List[str]:
        warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == (0 if request.param == "option" else 1), "one warning that says why"
        assert all("no native" in w for w in warnings)
        return [r.message for r in caplog.records]

    return lose
