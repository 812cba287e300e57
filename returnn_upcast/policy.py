"""
Which ops compute in float32 inside: the policy, and where it comes from.

The order is: :func:`scope`, :func:`set_policy`, then the resolver that :mod:`returnn_upcast.config` registers here
(config option ``rf_upcast``, then the behavior version).
"""

from __future__ import annotations
from typing import Any, Callable, ContextManager, FrozenSet, Iterator, Mapping, Optional, Union
import ast
import contextlib
import contextvars
import dataclasses

# On from behavior version 39, or with ``rf_upcast = True``.
OPS = (
    "attention",
    "batch_norm",
    "cross_entropy",
    "ctc_loss",
    "group_norm",
    "layer_norm",
    "normalize",
    "positional_encoding",
    "rms_norm",
)
# Off unless named: no option can know what user code does with their result.
OPT_IN_OPS = ("log_softmax", "softmax")
ALL_OPS = tuple(sorted(OPS + OPT_IN_OPS))

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclasses.dataclass(frozen=True)
class UpcastPolicy:
    """
    The ops that compute in float32 inside, a subset of :data:`ALL_OPS`.
    """

    ops: FrozenSet[str] = frozenset()

    def __post_init__(self):
        unknown = sorted(set(self.ops) - set(ALL_OPS))
        if unknown:
            raise ValueError(f"rf_upcast: unknown op {', '.join(map(repr, unknown))}; known: {', '.join(ALL_OPS)}")

    @classmethod
    def parse(cls, value: PolicyValue, *, base: Optional[UpcastPolicy] = None) -> UpcastPolicy:
        """
        :param value: True (all of :data:`OPS`), False (none), a dict op -> bool, or a policy.
            A string is taken as on the command line: ``"True"``, ``"off"``, ``"{'attention': False}"``.
        :param base: what the ops that a dict does not name take. None: off
        :return: the policy. ValueError on an unknown op or string, TypeError on another type
        """
        if isinstance(value, str):
            value = _parse_string(value)
        if isinstance(value, cls):
            return value
        if isinstance(value, bool):
            return cls(frozenset(OPS) if value else frozenset())
        if not isinstance(value, Mapping):
            raise TypeError(
                f"rf_upcast: expected True, False or a dict op -> bool, got {value!r} of type {type(value).__name__};"
                f" known ops: {', '.join(ALL_OPS)}"
            )
        wrong = {op: on for op, on in value.items() if not isinstance(on, bool)}
        if wrong:
            raise TypeError(f"rf_upcast: expected True or False per op, got {wrong!r}; known: {', '.join(ALL_OPS)}")
        cls(frozenset(value))  # check all names, also of those that are off
        on = frozenset(op for op, on in value.items() if on)
        return cls((base.ops if base else frozenset()) - frozenset(value) | on)

    def __contains__(self, op: str) -> bool:
        return op in self.ops

    def __bool__(self) -> bool:
        return bool(self.ops)

    def __str__(self) -> str:
        return ", ".join(sorted(self.ops)) or "none"


PolicyValue = Union[bool, str, Mapping[str, bool], UpcastPolicy]


def _parse_string(value: str) -> Any:
    if value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise ValueError(
            f"rf_upcast: cannot read {value!r}; expected True, False or a dict op -> bool;"
            f" known ops: {', '.join(ALL_OPS)}"
        ) from None


_scope: contextvars.ContextVar[Optional[UpcastPolicy]] = contextvars.ContextVar("rf_upcast_scope", default=None)
_override: Optional[PolicyValue] = None
_resolver: Callable[[Optional[PolicyValue]], UpcastPolicy] = lambda override: UpcastPolicy.parse(override or False)


def set_resolver(resolver: Callable[[Optional[PolicyValue]], UpcastPolicy]):
    """
    :param resolver: gets the value of :func:`set_policy` or None, and returns the policy outside of any scope
    """
    global _resolver
    _resolver = resolver


def get_policy() -> UpcastPolicy:
    """
    :return: the policy in effect here and now. Cheap, hooks call it at every op.
    """
    scoped = _scope.get()
    return scoped if scoped is not None else _resolver(_override)


def set_policy(value: Optional[PolicyValue]):
    """
    Process-wide override of the config, for scripts that have none.

    :param value: see :func:`UpcastPolicy.parse`; a dict is relative to the behavior version's default.
        None removes the override.
    """
    global _override
    if value is not None:
        UpcastPolicy.parse(value)  # errors now, not at the first op
    _override = dict(value) if isinstance(value, Mapping) else value


@contextlib.contextmanager
def _scope_ctx(policy: UpcastPolicy) -> Iterator[UpcastPolicy]:
    token = _scope.set(policy)
    try:
        yield policy
    finally:
        _scope.reset(token)


def scope(value: PolicyValue) -> ContextManager[UpcastPolicy]:
    """
    :param value: see :func:`UpcastPolicy.parse`; a dict is relative to the policy around the scope.
    :return: context in which this policy wins over all else, in this thread. Scopes nest.
    """
    return _scope_ctx(UpcastPolicy.parse(value, base=get_policy()))
