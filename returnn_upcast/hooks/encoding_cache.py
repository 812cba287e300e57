"""
RETURNN's caches of encodings, made to know the policy. Put in place by ``install()``, so it needs no torch.
"""

from __future__ import annotations
from typing import Any, Iterator, Optional, Tuple
import contextlib
import contextvars
import returnn.frontend as rf
from .. import dtypes
from ..policy import get_policy

# Inside the rotary attention classes, sin and cos stay float32 up to the rotation.
rotary: contextvars.ContextVar[bool] = contextvars.ContextVar("rf_upcast_rotary", default=False)


# While it is set, nothing is taken from the caches or put there.
bypass: contextvars.ContextVar[bool] = contextvars.ContextVar("rf_upcast_bypass", default=False)


@contextlib.contextmanager
def set_to_true(var: contextvars.ContextVar[bool]) -> Iterator[None]:
    """:return: context in which var is True"""
    token = var.set(True)
    try:
        yield
    finally:
        var.reset(token)


def is_low_name(dtype: Optional[str]) -> bool:
    """
    :param dtype: dtype name, None for the default float dtype
    :return: whether it is a float dtype narrower than 32 bit
    """
    return dtypes.is_low(dtype or rf.get_default_float_dtype())


class PolicyCache:
    """
    RETURNN's cache of sinusoidal or relative encodings, whose key has the dtype but not the policy:
    a cached stock encoding must not leak into an upcast run, nor the reverse.
    """

    def __init__(self, cache: Any):
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @staticmethod
    def _key(key: Tuple) -> Tuple:
        *_, dtype, _device = key
        if "positional_encoding" not in get_policy().ops or not is_low_name(dtype):
            return key
        return *key, "rf_upcast", rotary.get()

    def get(self, key: Tuple, default: Any = None) -> Any:
        """see :class:`returnn.frontend._cache.Cache`"""
        return default if bypass.get() else self._cache.get(self._key(key), default)

    def set(self, key: Tuple, value: Any):
        """see :class:`returnn.frontend._cache.Cache`"""
        if not bypass.get():
            self._cache.set(self._key(key), value)
