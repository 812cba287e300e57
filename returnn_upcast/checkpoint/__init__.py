"""
Checkpoints of RETURNN, torch and Flax: read, write, cast and convert, with every dtype kept to the bit.
"""

from __future__ import annotations
from .casting import cast, cast_file
from .common import Checkpoint, CheckpointError
from .comparing import Difference, compare
from .files import FORMATS, read, write
from .flax import checkpoint_from_flax, checkpoint_to_flax, from_flax, to_flax
from .modules import module_map

__all__ = [
    "FORMATS",
    "Checkpoint",
    "CheckpointError",
    "Difference",
    "cast",
    "cast_file",
    "checkpoint_from_flax",
    "checkpoint_to_flax",
    "compare",
    "from_flax",
    "module_map",
    "read",
    "to_flax",
    "write",
]
