"""
Names of dtypes. Not all releases of RETURNN count bfloat16 among the floats.
"""

from __future__ import annotations


def is_float(dtype: str) -> bool:
    """
    :param dtype: RETURNN's name, e.g. "bfloat16"
    :return: whether it is a (real) float dtype
    """
    return dtype.startswith(("float", "bfloat"))


def is_low(dtype: str) -> bool:
    """
    :param dtype: RETURNN's name
    :return: whether it is a float dtype narrower than 32 bit: what the package is about
    """
    return is_float(dtype) and dtype not in ("float32", "float64")
