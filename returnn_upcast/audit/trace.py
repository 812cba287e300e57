"""
Records every hooked op, call site by call site: a second layer of wrappers at the hook points, undone afterwards.

The op runs as it would. Then the same inputs go through stock RETURNN, through the upcast,
and through RETURNN's own code in float64, which is the reference.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple
import contextlib
import functools
import inspect
import math
import warnings
import torch
import returnn.frontend as rf
from returnn.frontend import attention
from returnn.tensor import Tensor
from .. import hooks
from ..patch import Patch, _load
from ..policy import UpcastPolicy, get_policy, scope
from . import causes, lost, measure, sources
from .report import CallSite
from .setup import dtype_name

MAX_ANALYSED = 4  # calls of one site; a recurrent decoder has one per step


class Trace:
    """
    What :func:`trace` yields. Filled during the block.

    :param model: names the call sites. None: the outermost module that runs is taken as the model
    :param analyse: compare with float64; else only magnitudes, NaN and inf of what runs anyway
    """

    def __init__(self, model: Any = None, analyse: bool = True):
        self._analyse = analyse
        self._names = None if model is None else sources.names_of(model)
        self._sites: Dict[Tuple[str, ...], CallSite] = {}
        self._busy = False
        self.failures: List[str] = []

    @property
    def sites(self) -> List[CallSite]:
        """:return: in the order of their first call"""
        return list(self._sites.values())

    def call(self, patch: Patch, func: Callable, args: Any, kwargs: Any) -> Any:
        """:return: ``func(*args, **kwargs)``, recorded unless it is a part of another recorded op"""
        if self._busy:
            return func(*args, **kwargs)
        self._busy = True
        try:
            op = patch.op or "attention"
            site = self._site(op, patch, args)
            self._look(self._before, site, func, args, kwargs)
            out = func(*args, **kwargs)
            self._look(self._after, site, args, kwargs, out)
            return out
        finally:
            self._busy = False

    def _look(self, look: Callable, site: CallSite, *args: Any):
        # what cannot be measured must not stop the user's step
        try:
            look(site, *args)
        except Exception as exc:
            self.failures.append(f"{site.function} at {site.path}: not measured, {type(exc).__name__}: {exc}")

    def _before(self, site: CallSite, func: Callable, args: Any, kwargs: Any):
        site.max_input = max(site.max_input, _max_input(args, kwargs))
        if site.calls == 1:
            found = lost.lost_before(site.op, func, args, kwargs, site.line)
            if found:
                site.lost_before, site.lost_line, site.helper = found
        if self._analyse and site.calls <= MAX_ANALYSED:
            with _undisturbed(args, kwargs):
                _analyse(site, func, args, kwargs)

    def _after(self, site: CallSite, args: Any, kwargs: Any, out: Any):
        site.max_output = max([site.max_output, *map(measure.magnitude, measure.results(out))])
        causes.explain(site)
        if not self._analyse:
            inputs = [x for x in measure.tensors_in([args, kwargs]) if measure.is_float(x)]
            site.limit = min([torch.finfo(getattr(torch, x.dtype)).max for x in inputs], default=math.inf)
            if all(map(measure.is_finite, inputs)):
                site.upcast_nonfinite += sum(not measure.is_finite(x) for x in measure.results(out))

    def _site(self, op: str, patch: Patch, args: Any) -> CallSite:
        module = args[0] if args and isinstance(args[0], rf.Module) else None
        path = sources.module_path(module, self._names)
        function = f"{patch.owner.rpartition(':')[2].rpartition('.')[2]}.{patch.name}"
        line = sources.user_line()
        site = self._sites.setdefault((path, op, function, line), CallSite(path, op, function, line))
        site.calls += 1
        return site


def _max_input(args: Any, kwargs: Any) -> float:
    tensors = [x for x in measure.tensors_in([args, kwargs]) if x.raw_tensor is not None]
    floats = [x for x in tensors if measure.is_float(x) and not isinstance(x, rf.Parameter)]
    dims = [v for k, v in kwargs.items() if k == "key_value_spatial_dim"]  # of a relative encoding: positions
    sizes = [float(d.get_dim_value()) for d in dims]
    return max([0.0, *sizes, *map(measure.magnitude, floats or [x for x in tensors if x.dtype != "bool"])])


@contextlib.contextmanager
def _undisturbed(args: Any, kwargs: Any) -> Iterator[None]:
    # running statistics, random state and gradients stay as they are
    buffers = [x for x in measure.tensors_in([args, kwargs]) if isinstance(x, rf.Parameter)]
    for module in [x for x in args if isinstance(x, rf.Module)]:
        buffers += [p for p in module.parameters() if p.auxiliary]
    saved = [(p.raw_tensor, p.raw_tensor.detach().clone()) for p in buffers]
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
        for raw, data in saved:
            if not torch.equal(raw, data):
                raw.data.copy_(data)


def _analyse(site: CallSite, func: Callable, args: Any, kwargs: Any):
    with scope(UpcastPolicy()):
        stock = _attempt(func, args, kwargs)
    with scope(UpcastPolicy(frozenset([site.op]))):
        upcast = _attempt(func, args, kwargs)
    if isinstance(upcast, Exception):
        return  # the user's call is wrong, and says so itself
    floats = [x for x in measure.tensors_in([args, kwargs]) if measure.is_float(x)]
    if site.calls == 1:
        inputs = [x for x in floats if not isinstance(x, rf.Parameter)]
        site.shapes = [_shape(x) for x in inputs]
        site.dtypes_in = [x.dtype for x in inputs]
        if inputs:
            site.limit = torch.finfo(getattr(torch, inputs[0].dtype)).max
        site.dtype_out = ", ".join(x.dtype for x in upcast)
        site.dtype_stock = "" if isinstance(stock, Exception) else ", ".join(x.dtype for x in stock)
        names = [*site.dtypes_in, *site.dtype_stock.split(", ")]
        site.low = any(name in ("bfloat16", "float16") or name.startswith("float8") for name in names)
        site.dtype_inside = causes.dtype_inside(site) if site.op in get_policy() else site.dtype_stock
    if site.low:
        _against_float64(site, stock, upcast, _float64(site.op, func, args, kwargs), floats)


def _shape(x: Tensor) -> str:
    sizes = [f"{dim.name or '?'}={dim.get_dim_value()}" for dim in x.dims]
    return f"[{', '.join(sizes)}]"


def _attempt(func: Callable, args: Any, kwargs: Any) -> Any:
    try:
        return measure.results(func(*args, **kwargs))
    except Exception as exc:
        return exc


def _against_float64(site: CallSite, stock: Any, upcast: List[Tensor], want: Any, inputs: List[Tensor]):
    if isinstance(want, Exception):
        return
    finite = all(map(measure.is_finite, inputs))
    worst = lambda old, new: new if old is None or not old >= new else old
    for out, ref in zip(upcast, want):
        found = measure.measure(out, ref)
        site.upcast_error, site.floor = worst(site.upcast_error, found.error), worst(site.floor, found.floor)
        site.upcast_nonfinite += found.nonfinite * finite
        site.elements += found.elements
    if isinstance(stock, Exception):
        site.stock_exception = f"{type(stock).__name__}: {(str(stock).strip().splitlines() or [''])[0][:200]}"
        site.stock_error = math.inf
        return
    for out, ref in zip(stock, want):
        found = measure.measure(out, ref)
        site.stock_error = worst(site.stock_error, found.error)
        site.stock_nonfinite += found.nonfinite * finite
        site.stock_zeros += found.zeros


def _float64(op: str, func: Callable, args: Any, kwargs: Any) -> Any:
    modules = [x for x in args if isinstance(x, rf.Module)]
    first = next((x for x in measure.tensors_in([args, kwargs]) if measure.is_float(x)), None)
    device = (first.device if first is not None else None) or rf.get_default_device() or "cpu"
    device = device.split(":")[0]
    # under autocast, the inputs of attention are those of the matmul
    amp = torch.get_autocast_dtype(device) if op == "attention" and torch.is_autocast_enabled(device) else None
    convert = functools.partial(_to_float64, first=dtype_name(amp) if amp else None)
    kwargs = {k: "float64" if k == "dtype" else convert(v) for k, v in kwargs.items()}
    if "dtype" not in kwargs and "dtype" in inspect.signature(func).parameters:
        kwargs["dtype"] = "float64"
    with torch.autocast(device, enabled=False), rf.set_default_float_dtype_ctx("float64"):
        with scope(UpcastPolicy()), _parameters_in_float64(modules):
            return _attempt(func, [x if x in modules else convert(x) for x in args], kwargs)


def _to_float64(value: Any, first: Optional[str] = None) -> Any:
    if isinstance(value, Tensor):
        if not measure.is_float(value):
            return value
        return rf.cast(rf.cast(value, first) if first and value.dtype == "float32" else value, "float64")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_float64(x, first) for x in value)
    return value


@contextlib.contextmanager
def _parameters_in_float64(modules: List[rf.Module]) -> Iterator[None]:
    saved = [(p, p.dtype, p.raw_tensor) for module in modules for p in module.parameters()]
    try:
        for param, _, raw in saved:
            if raw.is_floating_point():
                _set(param, "float64", torch.nn.Parameter(raw.detach().double(), requires_grad=False))
        yield
    finally:
        for param, dtype, raw in saved:
            _set(param, dtype, raw)


def _set(param: rf.Parameter, dtype: str, raw: torch.Tensor):
    param.raw_tensor = None
    param.dtype = dtype
    param.raw_tensor = raw


class _NoCache:
    """In place of RETURNN's cache of encodings: every layer computes its own, so every call is seen"""

    @staticmethod
    def get(_key: Any, default: Any = None) -> Any:
        """:return: nothing is cached"""
        return default

    def set(self, _key: Any, _value: Any):
        """forgets it"""


def _points() -> List[Patch]:
    # The rotary classes are containers: what they call is recorded. Rows without op are attention, or no op at all.
    rows = [
        p for p in hooks.PATCHES + hooks.TORCH_PATCHES if not p.replace and not p.hook.endswith(":rotary_attention")
    ]
    return [p for p in rows if p.op is not None or p.name in ("scaled_dot_product_attention", "rel_pos_self_attention")]


@contextlib.contextmanager
def trace(model: Any = None, *, analyse: bool = True) -> Iterator[Trace]:
    """
    Records the hooked ops of this block, in the policy and precision that are in effect there. Needs memory for one
    op in float64 at a time, and about four times the time. Puts the hooks in place if they are not.

    :param model: names the call sites. None: the outermost module that runs is taken as the model
    :param analyse: compare with float64; else only magnitudes, NaN and inf of what runs anyway
    :return: context; what it yields has the list ``sites``
    """
    installed = hooks.is_installed()
    hooks.install()
    result, undo = Trace(model, analyse), contextlib.ExitStack()
    with undo, warnings.catch_warnings():
        undo.callback(lambda: None if installed else hooks.uninstall())
        for patch in _points():
            owner = _load(patch.owner)
            raw = inspect.getattr_static(owner, patch.name)
            _replace(undo, owner, patch.name, _wrap(result, patch, raw))
        _replace(undo, attention, "_sinusoidal_positional_encoding_cache", _NoCache())
        if not analyse:
            yield result
            return
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        # What is compiled would compile again for each of our calls.
        with torch.compiler.set_stance("force_eager"), torch.autograd.detect_anomaly(check_nan=False):
            yield result


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any):
    own, raw = name in vars(owner), inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    undo.callback(lambda: setattr(owner, name, raw) if own else delattr(owner, name))


def _wrap(result: Trace, patch: Patch, raw: Any) -> Any:
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    func = raw.__func__ if kind else raw

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return result.call(patch, func, args, kwargs)

    return kind(wrapper) if kind else wrapper
