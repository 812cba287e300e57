"""
What autocast makes of low-precision inputs, per device: asked of torch itself, with tensors that have no data,
so that CUDA can be asked where there is none.
"""

from __future__ import annotations
from typing import Any, Callable, Dict
import torch
import torch.nn.functional as F

_labels = lambda x: torch.zeros(x.shape[0], dtype=torch.long, device=x.device)

FUNCTIONS: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "pow": lambda x: x.pow(2),
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: x.rsqrt(),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "cross_entropy": lambda x: F.cross_entropy(x, _labels(x)),
    "nll_loss": lambda x: F.nll_loss(x, _labels(x)),
}


def behavior(dtype: torch.dtype, device: str) -> Dict[str, Dict[str, str]]:
    """
    :param dtype: of autocast and of the inputs
    :param device: type
    :return: device type -> function -> dtype of the result, "?" where this torch cannot tell
    """
    return {dev: {name: _ask(func, dtype, dev) for name, func in FUNCTIONS.items()} for dev in {device: 0, "cuda": 0}}


def _ask(func: Callable, dtype: torch.dtype, device: str) -> str:
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        with FakeTensorMode():
            x: Any = torch.empty(8, 8, dtype=dtype, device=device)
            # not torch.autocast: that refuses CUDA where there is none
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, True)
            return str(func(x).dtype).split(".")[1]
    except Exception:
        return "?"
    finally:
        torch.set_autocast_enabled(device, saved[0])
        torch.set_autocast_dtype(device, saved[1])
