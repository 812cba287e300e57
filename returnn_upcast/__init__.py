"""
RETURNN's numerically delicate ops in float32 inside, when a model runs in bf16 or f16. See the README.

Importing has no side effect, and needs neither torch nor a GPU. :func:`install` puts the hooks in place.
"""

from __future__ import annotations
from . import upcast
from .config import BEHAVIOR_VERSION
from .hooks import install, is_installed, uninstall
from .version import __version__
from .policy import ALL_OPS, OPS, OPT_IN_OPS, UpcastPolicy, get_policy, scope, set_policy

__all__ = [
    "ALL_OPS",
    "BEHAVIOR_VERSION",
    "OPS",
    "OPT_IN_OPS",
    "UpcastPolicy",
    "__version__",
    "get_policy",
    "install",
    "is_installed",
    "scope",
    "set_policy",
    "uninstall",
    "upcast",
]
