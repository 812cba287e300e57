"""
The dtype of parameters, as opposed to the dtype of a computation: cast a model or a state dict, with masks.

Half precision for inference almost always; for training keep float32 master parameters;
norms in float32 cost nothing. A mask says what is cast: True means cast, as in Flax.
"""

from __future__ import annotations
from .arrays import cast_tensor, dtype_name, is_float, parse_dtype, to_numpy, to_torch
from .cast import cast_params, to_bf16, to_fp16, to_fp32
from .masks import norm_names, not_norms
from .report import assert_compute_dtype, dtype_report

__all__ = [
    "assert_compute_dtype",
    "cast_params",
    "cast_tensor",
    "dtype_name",
    "dtype_report",
    "norm_names",
    "is_float",
    "not_norms",
    "parse_dtype",
    "to_bf16",
    "to_fp16",
    "to_fp32",
    "to_numpy",
    "to_torch",
]
