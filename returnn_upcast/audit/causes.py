"""
Why stock is wrong at a call site, in words.
"""

from __future__ import annotations
import math
import torch
from .report import CallSite

# Below that, stock is as good as its dtype allows.
WORTH_NAMING = 1.5

_ROUNDED = {
    "attention": "the energies are rounded to {dtype} before the softmax",
    "batch_norm": "every step of the normalisation rounds to {dtype}",
    "cross_entropy": "log_softmax and loss are rounded to {dtype}",
    "ctc_loss": "log_softmax is rounded to {dtype} before CTC sees it",
    "group_norm": "statistics and normalisation round to {dtype}",
    "layer_norm": "statistics and normalisation round to {dtype}",
    "log_softmax": "the log-probs are rounded to {dtype}; on only if named in rf_upcast",
    "normalize": "statistics and normalisation round to {dtype}",
    "positional_encoding": "positions, angles and the rotation round to {dtype}",
    "rms_norm": "every step rounds to {dtype}",
    "softmax": "the probabilities are rounded to {dtype}; on only if named in rf_upcast",
}


def dtype_inside(site: CallSite) -> str:
    """:return: the dtype in which the upcast computes there"""
    wide = "float64" if "float64" in site.dtypes_in else "float32"
    return "float64" if site.op == "positional_encoding" and "apply_rope" not in site.function else wide


def low_dtype(site: CallSite) -> str:
    """:return: the low-precision dtype that takes part, "" if none does"""
    names = [*site.dtype_stock.split(", "), *site.dtypes_in, *site.dtype_out.split(", ")]
    return next((name for name in names if name and name not in ("float32", "float64")), "")


def exact_integers(dtype: str) -> int:
    """:return: up to this, the dtype holds all integers"""
    return int(2 / torch.finfo(getattr(torch, dtype)).eps)


def is_broken(site: CallSite) -> bool:
    """:return: whether stock is not only less precise but wrong there"""
    wrong = site.stock_error is not None and site.stock_error > 0.1 and site.stock_error > 10 * (site.upcast_error or 0)
    if site.op == "positional_encoding" and not wrong and site.stock_error is not None and low_dtype(site):
        too_far = site.max_input > exact_integers(low_dtype(site))
        wrong = too_far and site.stock_error > 10 * (site.upcast_error or 0)
    zeros = site.stock_zeros > 0.01 * max(site.elements, 1)
    return bool(site.stock_exception) or site.stock_nonfinite > site.upcast_nonfinite or zeros or wrong


def explain(site: CallSite):
    """
    :param site: its cause is set, from what was measured
    """
    dtype = low_dtype(site)
    if not site.low or not dtype or site.stock_error is None:
        site.cause = ""
    elif site.stock_exception:
        site.cause = f"stock raises {site.stock_exception}"
    elif is_broken(site):
        site.cause = _broken(site, dtype)
    elif site.stock_error > WORTH_NAMING * max(site.floor or 0.0, site.upcast_error or 0.0):
        site.cause = _ROUNDED[site.op].format(dtype=dtype)
    else:
        site.cause = ""


def _broken(site: CallSite, dtype: str) -> str:
    info = torch.finfo(getattr(torch, dtype))
    if site.op == "positional_encoding":
        exact = exact_integers(dtype)
        return (
            f"positions up to {site.max_input:,.0f} in {dtype}, which holds integers only up to {exact:,}:"
            f" positions and angles collide"
        )
    overflow = site.max_input**2 > info.max
    if overflow and site.op in ("rms_norm", "layer_norm", "group_norm", "batch_norm", "normalize"):
        effect = (
            f"{site.stock_zeros} of {site.elements} results are zero" if site.stock_zeros else "the result is inf/NaN"
        )
        return (
            f"inputs up to {site.max_input:,.4g}: their square overflows in {dtype} (above {info.max:,.0f}), {effect}"
        )
    if site.stock_nonfinite:
        return f"{site.stock_nonfinite} of {site.elements} results are inf or NaN, of finite inputs up to {site.max_input:,.4g}"
    if site.stock_zeros > 0.01 * max(site.elements, 1):
        return f"{site.stock_zeros} of {site.elements} results are zero: they, or what they come from, underflow in {dtype}"
    return _ROUNDED[site.op].format(dtype=dtype) + f": off by {100 * min(site.stock_error or 0, math.inf):.0f} %"
