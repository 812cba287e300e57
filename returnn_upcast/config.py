"""
From the config option ``rf_upcast`` and the behavior version to the policy.

Both are read lazily, at every op: the config file runs before either is known, and tests exchange them.
"""

from __future__ import annotations
from typing import Any, Dict, Optional, Tuple
import logging
from returnn.config import Config, get_global_config
from returnn.util.basic import BehaviorVersion
from . import policy
from .policy import ALL_OPS, OPS, PolicyValue, UpcastPolicy

# From this behavior version on, the upcast is on by default.
# A constant: the same config must mean the same with every RETURNN, whatever its latest version is.
BEHAVIOR_VERSION = 39
OPTION = "rf_upcast"
COMPILE_OPTION = "rf_upcast_compile"

log = logging.getLogger("returnn.frontend.upcast")

_OFF = UpcastPolicy()
_ON = UpcastPolicy(frozenset(OPS))
_cached: Tuple[Any, UpcastPolicy] = (None, _OFF)  # (option's value as text, behavior version), policy
_logged = set()


def behavior_default() -> UpcastPolicy:
    """:return: what the behavior version says"""
    return _ON if BehaviorVersion.get() >= BEHAVIOR_VERSION else _OFF


def read_option(config: Optional[Config], key: str) -> Any:
    """
    :param config: None if there is none
    :param key: name of the option
    :return: its value; None where unset. From the command line it arrives as a list of strings, split at commas
    """
    if config is None:
        return None
    value = config.typed_dict.get(key)
    if value is None:
        value = config.dict.get(key)
        if isinstance(value, (list, tuple)):
            value = ",".join(value)
    return value


def _resolve(override: Optional[PolicyValue]) -> UpcastPolicy:
    global _cached
    value = override
    if value is None:
        config = get_global_config(raise_exception=False)
        value = read_option(config, OPTION) if config is not None else None
    version = BehaviorVersion.get()
    # by its text: {"attention": 1} equals {"attention": True}, and a dict may be changed in place
    key = repr(value), version
    if key == _cached[0]:
        return _cached[1]
    base = behavior_default()
    result = UpcastPolicy.parse(value, base=base) if value is not None else base
    _cached = (key, result)
    if result and result not in _logged:
        _logged.add(result)
        log.info("rf_upcast: float32 inside for %s (%s)", result, _why(override, value))
    return result


def _why(override: Optional[PolicyValue], value: Any) -> str:
    if override is not None:
        return "set_policy"
    if value is not None:
        return f"option {OPTION} = {value!r}"
    return f"behavior_version {BehaviorVersion.get()}"


def explain() -> Dict[str, Tuple[bool, str]]:
    """
    :return: for every op: whether it is on, and why (scope, set_policy, option, behavior version or default)
    """
    resolved = policy.get_policy()
    if policy._scope.get() is not None:
        return {op: (op in resolved, "scope") for op in ALL_OPS}
    override = policy._override
    value = override if override is not None else read_option(get_global_config(raise_exception=False), OPTION)
    if isinstance(value, str):
        value = policy._parse_string(value)
    result = {}
    for op in ALL_OPS:
        if value is not None and (op in value if isinstance(value, (dict, UpcastPolicy)) else op in OPS):
            why = _why(override, value)
        elif op in OPS:
            why = f"behavior_version {BehaviorVersion.get()}" if BehaviorVersion.is_set() else "default"
        else:
            why = "default, opt-in"
        result[op] = (op in resolved, why)
    return result


def compile_option() -> Optional[bool]:
    """:return: the option ``rf_upcast_compile``, None where unset. TypeError if it is no bool"""
    value = read_option(get_global_config(raise_exception=False), COMPILE_OPTION)
    if isinstance(value, str):
        value = policy._WORDS.get(value.strip().lower(), value)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{COMPILE_OPTION}: expected True or False, got {value!r}")
    return value


policy.set_resolver(_resolve)
