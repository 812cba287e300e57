"""
RETURNN's gradient checkpointing: it records aten ops, below autocast, and replays them in backward.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Optional
import torch
from ..policy import get_policy


def autocast_state(original: Callable, dev: torch.device) -> Optional[Dict[str, Any]]:
    """
    ``_get_dev_amp_state``, the arguments of the autocast around the replay. What is recorded is cast already.
    Replayed under autocast (that of who calls backward), float32 products from inside of an op would be cast down.
    """
    return {"enabled": False} if get_policy() else original(dev)
