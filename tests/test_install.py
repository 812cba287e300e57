"""
install() and uninstall(): explicit, idempotent, undone without a trace, refused by name where RETURNN lacks a hook point.
"""

from __future__ import annotations
import inspect
import subprocess
import sys
import pytest
import returnn
import returnn.frontend as rf
from returnn.config import Config, global_config_ctx
import returnn_upcast
from returnn_upcast import hooks, patch


def _points():
    """every attribute that is patched: owner, name -> whether it is the owner's own, the raw object"""
    result = {}
    for item in hooks.PATCHES + hooks.TORCH_PATCHES:
        owner = patch._load(item.owner)
        result[item] = (item.name in vars(owner), inspect.getattr_static(owner, item.name))
    return result


def test_uninstall_restores_the_original_objects():
    before = _points()
    returnn_upcast.install()
    during = _points()
    assert all(during[item][1] is not before[item][1] for item in before)
    assert {str(item) for item in patch.applied()} == {str(item) for item in before}
    returnn_upcast.uninstall()
    after = _points()
    for item in before:
        assert after[item][0] == before[item][0], item
        assert after[item][1] is before[item][1], item
    assert not hasattr(rf, "upcast") and not returnn_upcast.is_installed()


def test_twice_is_once():
    returnn_upcast.install()
    first = _points()
    returnn_upcast.install()
    assert all(_points()[item][1] is first[item][1] for item in first)
    returnn_upcast.uninstall()
    returnn_upcast.uninstall()


def test_kinds_of_methods_are_kept():
    kinds = {item: type(raw) for item, (_, raw) in _points().items() if not item.replace}
    returnn_upcast.install()
    assert {item: type(raw) for item, (_, raw) in _points().items() if not item.replace} == kinds


def test_lost_hook_point_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(rf.LayerNorm, "__call__")
    before = inspect.getattr_static(rf.RMSNorm, "__call__")
    with pytest.raises(RuntimeError, match="normalization.LayerNorm.__call__") as info:
        returnn_upcast.install()
    assert "RMSNorm" not in str(info.value)
    assert inspect.getattr_static(rf.RMSNorm, "__call__") is before and not hasattr(rf, "upcast")


def test_changed_hook_point_is_refused_by_name(monkeypatch):
    from returnn.torch.frontend import TorchBackend

    monkeypatch.setattr(TorchBackend, "ctc_loss", staticmethod(lambda *, logits, targets: None))
    with pytest.raises(RuntimeError, match=r"TorchBackend.ctc_loss \(parameter blank_index"):
        returnn_upcast.install()
    assert not returnn_upcast.is_installed()


def test_lost_hook_point_in_a_module_that_is_not_loaded(tmp_path):
    source = tmp_path / "torch" / "frontend" / "_backend.py"
    source.parent.mkdir(parents=True)
    source.write_text("class TorchBackend:\n    def softmax(tensor, *, axis): pass\n")
    patches = [
        patch.Patch("notloaded.torch.frontend._backend:TorchBackend", n, "", None, ("axis", "use_mask"))
        for n in ("softmax", "conv")
    ]
    missing = patch.missing(patches, tmp_path)
    assert missing == [
        "notloaded.torch.frontend._backend.TorchBackend.softmax (parameter use_mask)",
        "notloaded.torch.frontend._backend.TorchBackend.conv",
    ]


def test_too_old_returnn_is_refused(monkeypatch):
    monkeypatch.setattr(returnn, "__version__", "1.20260601.120000")
    with pytest.raises(RuntimeError, match="1.20260601.120000 is too old, 1.20260722"):
        returnn_upcast.install()
    assert not returnn_upcast.is_installed()
    monkeypatch.setattr(returnn, "__version__", "1.20261022.211313+git.abc")
    returnn_upcast.install()


_SCRIPT = """
import sys, pickle
import returnn_upcast
assert "torch" not in sys.modules, "import"
returnn_upcast.install()
import returnn.frontend as rf
decorated = rf.upcast.in_float32(len)
assert "torch" not in sys.modules, "install"
{more}
"""
_SELECT = """
rf.select_backend_torch()
from returnn.torch.frontend import TorchBackend
from returnn_upcast import hooks, patch
assert set(patch.applied()) == set(hooks.PATCHES + hooks.TORCH_PATCHES)
returnn_upcast.uninstall()
assert not hasattr(TorchBackend.ctc_loss, "__wrapped__")
"""
_BY_TENSOR = """
import torch
dim = rf.Dim(64, name="d")
returnn_upcast.set_policy(True)
x = rf.Tensor("x", [dim], dtype="float16", raw_tensor=torch.full((64,), 300.0, dtype=torch.float16))
assert rf.log_softmax(x, axis=dim).raw_tensor is not None
from returnn_upcast import hooks, patch
assert set(patch.applied()) == set(hooks.PATCHES + hooks.TORCH_PATCHES)
"""


@pytest.mark.parametrize("more", ["", _SELECT, _BY_TENSOR], ids=["worker", "select", "by_tensor"])
def test_without_torch_at_first(more):
    """A config runs before RETURNN has set up the environment for torch, and dataset workers never need it."""
    subprocess.run([sys.executable, "-c", _SCRIPT.format(more=more)], check=True, timeout=120)


def test_options_reach_a_dataset_worker():
    import pickle

    config = Config({"rf_upcast": {"attention": True}, "returnn_upcast_module": None})
    copy = pickle.loads(pickle.dumps(config))
    with global_config_ctx(copy):
        assert returnn_upcast.get_policy().ops == {"attention"}
