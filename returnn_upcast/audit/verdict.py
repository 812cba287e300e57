"""
From the figures to plain words, what matters most first.
"""

from __future__ import annotations
from typing import Dict, Iterator, List, Optional, Tuple
import math
import statistics
from . import causes
from .report import AuditReport, CallSite, Variant

# Smaller relative changes of the gradient's error than this are not called an effect. What the ops are spared is lost in
# the rounding of all else, so it varies from batch to batch: by how much is seen from two batches on.
EFFECT = 0.02
EFFECT_ONE_BATCH = 0.1


def judge(report: AuditReport):
    """
    :param report: its verdict and effect are set
    """
    low = [site for site in report.sites if site.low]
    if not low:
        report.verdict, report.effect = [*_no_effect(report)], False
        return
    lines = [*_failures(report), *_broken(low), *_nonfinite(report), *_lost(report.sites)]
    broken = bool(lines)
    change = _change(report)
    lines += [line for line, _ in change]
    report.effect = broken or any(effect for _, effect in change)
    lines += [*_ops(report, low)] if report.effect else []
    lines += [*_cost(report)]
    report.verdict = lines


def _no_effect(report: AuditReport) -> Iterator[str]:
    if report.sites:
        ops = ", ".join(sorted({site.op for site in report.sites}))
        yield f"No effect on this model: its {len(report.sites)} hooked ops ({ops}) see no low precision."
    else:
        yield "No effect on this model: it calls none of the ops that the upcast covers."
    yield f"Precision: {report.precision}. The upcast changes only bf16, f16 and the like."


def _failures(report: AuditReport) -> Iterator[str]:
    off, on = report.variant("off"), report.variant("on")
    if off is not None and off.error:
        site = next((s for s in report.sites if s.stock_exception), None)
        where = f" in {site.op} at {site.path} ({site.line})" if site else ""
        fine = ". With the upcast on it runs." if on is not None and not on.error else "."
        yield f"Stock fails with {off.error}{where}{fine}"
    if on is not None and on.error:
        yield f"With the upcast on, the step fails with {on.error}."


def _nonfinite(report: AuditReport) -> Iterator[str]:
    for variant in (report.variant("off"), report.variant("on")):
        if variant is not None and variant.nonfinite:
            yield f"Upcast {variant.name}: {variant.nonfinite:,} losses and gradient elements are NaN or infinite."


def _broken(sites: List[CallSite]) -> Iterator[str]:
    groups: Dict[Tuple[str, str], List[CallSite]] = {}
    for site in sites:
        if causes.is_broken(site) and not site.stock_exception:
            groups.setdefault((site.op, site.function), []).append(site)
    for (op, _), group in groups.items():
        worst = max(group, key=lambda s: (s.stock_error or 0.0, s.max_input))
        more = f" (and at {len(group) - 1} more places)" if len(group) > 1 else ""
        yield f"{op} at {worst.path}{more}: {worst.cause}."


def _lost(sites: List[CallSite]) -> Iterator[str]:
    for site in sites:
        if site.lost_before:
            line = site.lost_line or site.line
            yield f"{site.op} at {site.path}: {site.lost_before}, at {line}. No option reaches that: use {site.helper}."


def gain(before: Variant, after: Variant) -> Tuple[float, bool]:
    """
    :return: by which part after has less error than before (negative: more), and whether that is more than chance
    """
    a, b = _error(before), _error(after)
    if not math.isfinite(a) or not math.isfinite(b):
        return (0.0, False) if a == b else (math.copysign(math.inf, a - b), True)
    value = 1 - b / a if a > 0 else 0.0
    each = [1 - y / x for x, y in zip(before.batch_errors, after.batch_errors) if 0 < x < math.inf and y < math.inf]
    if len(each) < 2:
        return value, abs(value) > EFFECT_ONE_BATCH
    return value, abs(value) > max(EFFECT, 2 * statistics.stdev(each) / math.sqrt(len(each)))


def _change(report: AuditReport) -> List[Tuple[str, bool]]:
    off, on = report.variant("off"), report.variant("on")
    if off is None or on is None or off.error or on.error:
        return []
    value, significant = gain(off, on)
    what = "gradient" if off.gradient_error is not None else "outputs"
    against = f"against {report.reference}: {_error(off):.2g} with stock ops, {_error(on):.2g} with the upcast"
    losses = ", ".join(f"{a.name} {a.difference:.1e} to {b.difference:.1e}" for a, b in zip(off.losses, on.losses))
    if value == math.inf:
        line = f"Only with the upcast, the {what} is finite ({against}; {losses})."
    elif value == -math.inf:
        line = f"With the upcast, the {what} is no longer finite ({against}; {losses})."
    elif not significant:
        line = f"The upcast has no measurable effect on the error of the {what} ({against}; {losses})."
    elif value > 0:
        line = f"The upcast removes {100 * value:.0f} % of the error of the {what} ({against}; {losses})."
    else:
        line = f"With the upcast, the error of the {what} is {-100 * value:.0f} % larger ({against}; {losses})."
    lines = [(line, significant), *_of_parameters(off, on)]
    words = {"dropout": "another dropout seed", "order": "another reduction order"}
    noises = [f"{words[n.kind]} changes it by {n.gradient:.1e}" for n in report.noise if n.gradient is not None]
    if noises:
        lines.append((f"For comparison, {' and '.join(noises)}.", False))
    return lines


def _of_parameters(off: Variant, on: Variant) -> Iterator[Tuple[str, bool]]:
    # One large parameter, e.g. an embedding, may hide all others in the error of the whole gradient.
    before, after = off.median_param_error, on.median_param_error
    if not before or after is None:
        return
    value = 1 - after / before if before < math.inf else float(after < before)
    worst = on.worst_params[0]
    yield (
        f"Parameter by parameter, the median error goes from {before:.1e} to {after:.1e} ({-100 * value:+.0f} %);"
        f" largest with the upcast: {worst.name}, {worst.error:.1e} on {100 * worst.share:.0f} % of the gradient's norm.",
        abs(value) > EFFECT_ONE_BATCH,
    )


def _error(variant: Variant) -> float:
    if variant.gradient_error is not None:
        return variant.gradient_error
    return max((loss.difference for loss in variant.losses), default=0.0)


def contributions(report: AuditReport) -> List[Tuple[str, float, bool]]:
    """
    :return: op, error that comes back if it alone is off (squares subtract), whether that is more than chance.
        Largest first
    """
    on, result = report.variant("on"), []
    for variant in report.variants:
        op = variant.name.partition("on without ")[2]
        if op and on is not None and not on.error:
            error = math.inf if variant.error else _error(variant)
            value, significant = gain(variant, on)
            back = math.sqrt(max(error**2 - _error(on) ** 2, 0.0)) if error < math.inf else math.inf
            result.append((op, back, back == math.inf or (significant and value > 0)))
    return sorted(result, key=lambda item: -item[1])


def _ops(report: AuditReport, sites: List[CallSite]) -> Iterator[str]:
    found = contributions(report)
    if not found:
        ops = sorted({site.op for site in sites})
        if len(ops) == 1:
            yield f"All of it is {ops[0]} ({len(sites)} call sites)."
        return
    failed = {v.name for v in report.variants if v.error}
    word = lambda op: "fails without it" if f"on without {op}" in failed else "not finite without it"
    show = lambda op, error: f"{op} {word(op) if error == math.inf else f'{error:.1e}'}{_worst(op, sites)}"
    big = [show(op, error) for op, error, significant in found if significant]
    small = [op for op, _, significant in found if not significant]
    if big:
        yield f"Error that each op brings back if it alone is off: {'; '.join(big)}."
    if small:
        yield f"Too small to tell: {', '.join(small)}."


def _worst(op: str, sites: List[CallSite]) -> str:
    mine = [s for s in sites if s.op == op and s.stock_error is not None]
    worst = max(mine, key=lambda s: s.stock_error, default=None)
    return f" (worst at {worst.path})" if worst is not None else ""


def _cost(report: AuditReport) -> Iterator[str]:
    off, on = report.variant("off"), report.variant("on")
    if off is None or on is None or off.error or on.error:
        return
    parts = [
        _percent("time per step", off.seconds, on.seconds, f"{on.seconds or 0:.3g} s"),
        _percent(f"memory ({report.memory_kind})", off.memory, on.memory, f"{(on.memory or 0) / 2**20:.4g} MiB"),
    ]
    parts = [part for part in parts if part]
    if parts:
        yield f"What it costs: {', '.join(parts)}."


def _percent(what: str, before: Optional[float], after: Optional[float], value: str) -> str:
    if not before or after is None:
        return ""
    return f"{what} {100 * (after / before - 1):+.0f} % ({value})"
