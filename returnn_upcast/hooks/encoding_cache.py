"""
RETURNN's cache of sinusoidal encodings, made to know the policy. Put in place by ``install()``, so it needs no torch.
"""

from __future__ import annotations
from typing import Any, Optional, Tuple
import contextvars
import returnn.frontend as rf
from .. import dtypes
from ..policy import get_policy

# Inside the rotary attention classes, sin and cos stay float32 up to the rotation.
rotary: contextvars.ContextVar[bool] = contextvars.ContextVar("rf_upcast_rotary", default=False)


def is_low_name(dtype: Optional[str]) -> bool:
    """
    :param dtype: dtype name, None for the default float dtype
    :return: whether it is a float dtype narrower than 32 bit
    """
    return dtypes.is_low(dtype or rf.get_default_float_dtype())


class PolicyCache:
    """
    RETURNN's cache of sinusoidal encodings, whose key has the dtype but not the policy:
    a cached stock encoding must not leak into an upcast run, nor the reverse.
    """

    def __init__(self, cache: Any):
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @staticmethod
    def _key(key: Tuple) -> Tuple:
        _spatial, _feat, _offset, _base, dtype, _device = key
        if "positional_encoding" not in get_policy().ops or not is_low_name(dtype):
            return key
        return *key, "rf_upcast", rotary.get()

    def get(self, key: Tuple, default: Any = None) -> Any:
        """see :class:`returnn.frontend._cache.Cache`"""
        return self._cache.get(self._key(key), default)

    def set(self, key: Tuple, value: Any):
        """see :class:`returnn.frontend._cache.Cache`"""
        self._cache.set(self._key(key), value)
