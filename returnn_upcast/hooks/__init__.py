"""
The table of hook points, and what puts it in place.

Nothing here needs torch: the hooks are imported at their first use.
"""

from __future__ import annotations
from typing import Any, Callable, Tuple
import pathlib
import sys
import returnn
import returnn.frontend as rf
from returnn.util.basic import BehaviorVersion
from .. import config, patch
from ..patch import Patch

MIN_RETURNN = (1, 20260722)

_NORM = "returnn.frontend.normalization"
_ATT = "returnn.frontend.attention"
_BACKEND = "returnn.frontend._backend:Backend"
_PACKED = "returnn.frontend._packed_backend:PackedBackend"
_TORCH = "returnn.torch.frontend._backend:TorchBackend"
_H = "returnn_upcast.hooks"

_SDPA = (
    "query", "key", "value", "attention_mask", "att_dropout", "att_dropout_broadcast", "v_feat_dim", "qk_feat_dim",
    "kv_spatial_dim", "query_spatial_dim", "is_causal", "scale",
)  # fmt: skip
_REL_POS = (
    "query", "key", "value", "pos_emb", "pos_bias_u", "pos_bias_v", "att_dropout", "att_dropout_broadcast",
    "v_feat_dim", "qk_feat_dim", "kv_spatial_dim", "query_spatial_dim", "pos_emb_spatial_dim",
)  # fmt: skip
_CTC = ("logits", "logits_normalized", "targets", "input_spatial_dim", "targets_spatial_dim", "blank_index")
_BATCH_NORM = (
    "source", "in_dim", "running_mean", "running_variance", "gamma", "beta", "epsilon", "momentum", "affine", "use_mask"
)  # fmt: skip
_CE = ("estimated", "target", "axis", "estimated_type")

PATCHES: Tuple[Patch, ...] = (
    Patch(f"{_NORM}:LayerNorm", "__call__", f"{_H}.norm:layer_norm", "layer_norm", ("x",)),
    Patch(f"{_NORM}:RMSNorm", "__call__", f"{_H}.norm:rms_norm", "rms_norm", ("x",)),
    Patch(f"{_NORM}:GroupNorm", "__call__", f"{_H}.norm:group_norm", "group_norm", ("x",)),
    Patch(f"{_NORM}:GroupNormSpatial", "__call__", f"{_H}.norm:group_norm", "group_norm", ("x", "spatial_dim")),
    Patch(f"{_NORM}:BatchNorm", "__call__", f"{_H}.norm:batch_norm_masked", "batch_norm", ("source",)),
    Patch(f"{_NORM}:Normalize", "__call__", f"{_H}.norm:normalize_module", "normalize", ("a", "axis")),
    Patch(_NORM, "normalize", f"{_H}.norm:normalize", "normalize", ("a", "axis", "epsilon")),
    Patch("returnn.frontend", "normalize", f"{_H}.norm:normalize", "normalize", ("a", "axis", "epsilon")),
    # These two ask for the policy by themselves: with attention off, the softmax inside must stay stock as well.
    Patch(_BACKEND, "scaled_dot_product_attention", f"{_H}.attention:scaled_dot_product_attention", None, _SDPA),
    Patch(_BACKEND, "rel_pos_self_attention", f"{_H}.attention:rel_pos_self_attention", None, _REL_POS),
    # Default arguments hold rf.sinusoidal_positional_encoding itself, so what it calls is hooked, and its cache.
    Patch(_ATT, "_sinusoidal_positional_encoding_cache", f"{_H}.encoding_cache:PolicyCache", replace=True),
    Patch(_ATT, "_relative_positional_encoding_cache", f"{_H}.encoding_cache:PolicyCache", replace=True),
    *(
        Patch(owner, name, f"{_H}.encoding:{name}", "positional_encoding", params)
        for owner in (_ATT, "returnn.frontend")
        for name, params in [
            ("sinusoidal_encoding", ("indices", "feat_dim", "base", "dtype")),
            ("relative_positional_encoding", ("query_spatial_dim", "key_value_spatial_dim", "feat_dim", "dtype")),
        ]
    ),
    *(
        Patch(f"{_ATT}:{cls}", "__call__", f"{_H}.encoding:rotary_attention", "positional_encoding", ("source", "axis"))
        for cls in ("RotaryPosSelfAttention", "RotaryPosCausalSelfAttention")
    ),
    Patch(_BACKEND, "apply_rope", f"{_H}.encoding:apply_rope", "positional_encoding", ("x", "pos_enc", "feat_dim")),
    Patch("returnn.frontend.loss", "cross_entropy", f"{_H}.loss:cross_entropy", "cross_entropy", _CE),
    Patch("returnn.frontend", "cross_entropy", f"{_H}.loss:cross_entropy", "cross_entropy", _CE),
    Patch(_PACKED, "batch_norm", f"{_H}.norm:packed_batch_norm", "batch_norm"),
    Patch(_PACKED, "ctc_loss", f"{_H}.loss:packed_ctc_loss", "ctc_loss", _CTC),
    Patch(_PACKED, "softmax", f"{_H}.loss:softmax", "softmax", ("tensor", "axis", "use_mask")),
    Patch(_PACKED, "log_softmax", f"{_H}.loss:softmax", "log_softmax", ("tensor", "axis", "use_mask")),
    # For the option rf_upcast_audit; without it, nothing is done there.
    Patch(
        "returnn.engine.base:EngineBase",
        "init_train_from_config",
        "returnn_upcast.audit.training:init_train_from_config",
        None,
        ("config",),
    ),
    Patch("returnn.engine.base:EngineBase", "init_train_from_config", f"{_H}.distributed:init_train_from_config"),
    # RETURNN calls this once it has loaded the torch backend.
    Patch("returnn.frontend._backend", "_get_tensor_types_torch", f"{_H}:_on_torch_backend"),
)
TORCH_PATCHES: Tuple[Patch, ...] = (
    Patch(_TORCH, "batch_norm", f"{_H}.norm:batch_norm", "batch_norm", _BATCH_NORM),
    Patch(_TORCH, "apply_rope", f"{_H}.encoding:apply_rope", "positional_encoding", ("x", "pos_enc", "feat_dim")),
    Patch(
        _TORCH,
        "softmax_cross_entropy_with_logits",
        f"{_H}.loss:cross_entropy_with_logits",
        "cross_entropy",
        ("logits", "targets", "axis"),
    ),
    Patch(_TORCH, "ctc_loss", f"{_H}.loss:ctc_loss", "ctc_loss", _CTC),
    Patch(_TORCH, "ctc_best_path", f"{_H}.loss:ctc_best_path", "ctc_loss", _CTC),
    Patch(_TORCH, "softmax", f"{_H}.loss:softmax", "softmax", ("tensor", "axis", "use_mask")),
    Patch(_TORCH, "log_softmax", f"{_H}.loss:softmax", "log_softmax", ("tensor", "axis", "use_mask")),
    # Its module imports torch.
    Patch(
        "returnn.torch.util.gradient_checkpoint",
        "_get_dev_amp_state",
        f"{_H}.gradient_checkpoint:autocast_state",
        None,
        ("dev",),
    ),
)

_stock_latest_version: Any = None


def is_installed() -> bool:
    """:return: whether the hooks are in place"""
    return bool(patch.applied())


def install():
    """
    Adds ``rf.upcast`` and puts the hooks in place; by itself it changes no number: see ``rf_upcast``.
    Call it in the config or before the model is built, as often as you like.

    :raises RuntimeError: this RETURNN is too old or has lost a hook point; then nothing is hooked
    """
    global _stock_latest_version
    if is_installed():
        return
    _check_returnn()
    patch.apply(PATCHES)
    if _TORCH.partition(":")[0] in sys.modules:
        patch.apply(TORCH_PATCHES)
    from .. import upcast

    rf.upcast = upcast
    # so that 39 gives no false "your RETURNN is too old", while 40 still does
    _stock_latest_version = BehaviorVersion._latest_behavior_version
    BehaviorVersion._latest_behavior_version = max(_stock_latest_version, config.BEHAVIOR_VERSION)


def uninstall():
    """Takes everything back: every attribute of RETURNN is the original object again."""
    if not is_installed():
        return
    patch.restore()
    del rf.upcast
    BehaviorVersion._latest_behavior_version = _stock_latest_version


def _on_torch_backend(original: Callable) -> Any:
    patch.apply(TORCH_PATCHES)
    return original()


def _check_returnn():
    version = returnn.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    need = ".".join(map(str, MIN_RETURNN))
    if numbers < MIN_RETURNN:
        raise RuntimeError(
            f"returnn_upcast: RETURNN {version} is too old, {need} or newer is needed. Nothing is hooked."
        )
    lost = patch.missing(PATCHES + TORCH_PATCHES, pathlib.Path(returnn.__file__).parent)
    if lost:
        raise RuntimeError(
            f"returnn_upcast: RETURNN {version} does not have the hook points that it had in {need}:"
            f" {', '.join(lost)}. Nothing is hooked."
        )
