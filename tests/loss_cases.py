"""
Logits and labels in RETURNN's dims, and its CTC run on them.
"""

from __future__ import annotations
from typing import Any, Dict
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import seq_dim, tensor, values

B, T, V, S = 3, 19, 37, 5
LENS, TARGET_LENS = [19, 11, 7], [5, 2, 0]
batch, vocab = Dim(B, name="batch"), Dim(V, name="vocab")
time = seq_dim("time", LENS, batch)
target_dim = seq_dim("target", TARGET_LENS, batch)
LOGITS = values(B, T, V, seed=1, std=4.0)
CTC_LABELS = torch.randint(0, V - 1, (B, S), generator=torch.Generator().manual_seed(3))
GRAD = values(B, T, seed=5).abs() + 0.5
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]
WIDE = ["bf16", "f16", "amp-bf16"]


def ctc_args(frames: Dim = time, targets: torch.Tensor = CTC_LABELS) -> Dict[str, Any]:
    """:return: all that RETURNN's functions of CTC need beside the logits"""
    targets = rf.convert_to_tensor(targets, dims=(batch, target_dim), sparse_dim=vocab)
    return dict(targets=targets, input_spatial_dim=frames, targets_spatial_dim=target_dim, blank_index=V - 1)


def run_ctc(x: torch.Tensor, order=(0, 1, 2), targets=CTC_LABELS, **kwargs):
    """loss [B], gradient in the order B, T, V"""
    dims = (batch, time, vocab)
    x = x.detach().permute(order).contiguous().requires_grad_(True)
    out = rf.ctc_loss(
        logits=tensor(x, *(dims[i] for i in order), feature_dim=vocab),
        **ctc_args(targets=targets),
        **kwargs,
    )
    raw = out.copy_compatible_to_dims_raw([batch])
    raw.backward(GRAD[:, 0].to(raw.dtype))
    return raw.detach(), x.grad.permute([order.index(i) for i in range(3)])
