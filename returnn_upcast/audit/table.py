"""
The report as text, as wide as the terminal.
"""

from __future__ import annotations
from typing import List, Optional, Sequence
import math
import shutil
import textwrap
from . import causes
from .report import AuditReport, CallSite, Variant

MIN_WIDTH = 40
MIN_COLUMN = 20
MAX_SITES = 30


def render(report: AuditReport, width: Optional[int] = None) -> str:
    """
    :param report: to show, the verdict first
    :param width: characters per line; None: of the terminal
    :return: text
    """
    width = max(width or shutil.get_terminal_size((120, 24)).columns, MIN_WIDTH)
    lines: List[str] = []
    for text in report.verdict:
        lines += textwrap.wrap(text, width, initial_indent="* ", subsequent_indent="  ")
    lines += ["", *_wrap(f"{report.name}: {report.precision}, on {report.device}; reference {report.reference}", width)]
    lines += _wrap(f"batches: {'; '.join(report.batches)}", width)
    if report.variants:
        text = "Relative errors of the gradient (and the median over its parameters) and of the losses:"
        lines += ["", *_wrap(text, width), *table(*_variants(report), width=width)]
    if report.sites:
        text = "Relative errors by call site, against float64 on the same inputs; dtypes: in>inside>out:"
        lines += ["", *_wrap(text, width), *table(*_sites(by_effect(report.sites)[:MAX_SITES]), width=width)]
        more = len(report.sites) - MAX_SITES
        lines += [f"... and {more} more call sites, see --html or --json"] if more > 0 else []
    if report.autocast and "autocast to" in report.precision:
        lines += ["", *_wrap(_autocast(report), width)]
    for note in report.notes:
        lines += _wrap(f"Note: {note}", width)
    return "\n".join([*lines, *_wrap(f"took {report.seconds:.0f} s", width)])


def _wrap(text: str, width: int) -> List[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ") or [""]


def number(value: Optional[float]) -> str:
    """:return: three digits at most, "-" for None"""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return (
        f"{value:.0f}"
        if value == int(value) and abs(value) < 1e5
        else f"{value:.2g}"
        if value < 1e-2
        else f"{value:.3g}"
    )


def _variants(report: AuditReport):
    names = list(dict.fromkeys(loss.name for v in report.variants for loss in v.losses))
    head = ["variant", "gradient", "median", *names, "s/step", "MiB"]
    head += ["NaN/inf", "worst parameter"]
    return head, [_variant(v, names) for v in report.variants], len(head) - 1


def _variant(v: Variant, names: Sequence[str]) -> List[str]:
    if v.error:
        return [v.name, "failed", *["-"] * (len(names) + 4), v.error]
    losses = {loss.name: loss.difference for loss in v.losses}
    worst = v.worst_params[0] if v.worst_params else None
    return [
        v.name,
        number(v.gradient_error),
        number(v.median_param_error),
        *(number(losses.get(name)) for name in names),
        number(v.seconds),
        number(None if v.memory is None else v.memory / 2**20),
        str(v.nonfinite),
        f"{number(worst.error)} {worst.name}" if worst else "-",
    ]


def _sites(sites: Sequence[CallSite]):
    head = ["op", "where", "stock", "upcast", "floor", "max in", "cause", "dtypes", "limit", "calls"]
    rows = []
    for s in sites:
        kinds = f"{'/'.join(dict.fromkeys(s.dtypes_in)) or '-'}>{s.dtype_inside or '-'}>{s.dtype_out or '-'}"
        for long, short in (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32"), ("float64", "f64")):
            kinds = kinds.replace(long, short)
        errors = [number(x) for x in (s.stock_error, s.upcast_error, s.floor)]
        limit = "-" if s.limit == math.inf else f"{s.limit:.0e}"
        cause = s.lost_before or s.cause
        rows.append([s.op, s.path, *errors, number(s.max_input), cause, kinds, limit, str(s.calls)])
    return head, rows, head.index("cause"), head.index("where")


def by_effect(sites: Sequence[CallSite]) -> List[CallSite]:
    """:return: what is broken first, then by the error of stock"""
    return sorted(sites, key=lambda s: (not causes.is_broken(s), not s.lost_before, -(s.stock_error or 0.0)))


def _autocast(report: AuditReport) -> str:
    parts = []
    for device, ops in report.autocast.items():
        wide = [op for op, dtype in ops.items() if dtype == "float32"]
        parts.append(f"{device}: {', '.join(wide) or 'nothing'}")
    return f"Autocast by itself returns float32 of low-precision inputs for: {'. '.join(parts)}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *shrink: int, width: int) -> List[str]:
    """
    :param head: of the columns, the most important ones first
    :param rows: of text
    :param shrink: columns that may be cut, in this order
    :param width: of the lines. If they don't fit, the last columns are left out, but no column of shrink
    :return: lines
    """
    keep = list(range(len(head)))
    while True:
        sizes = {i: max(len(row[i]) for row in [head, *rows]) for i in keep}
        excess = sum(sizes.values()) + 2 * (len(keep) - 1) - width
        for i in shrink:
            cut = max(0, min(excess, sizes[i] - MIN_COLUMN))
            sizes[i], excess = sizes[i] - cut, excess - cut
        droppable = [i for i in keep[1:] if i not in shrink]
        if excess <= 0 or not droppable:
            break
        keep.remove(droppable[-1])
    line = lambda row: "  ".join(_fit(row[i], size) for i, size in sizes.items()).rstrip()[:width]
    return [line(head), "  ".join("-" * size for size in sizes.values())[:width], *map(line, rows)]


def _fit(cell: str, size: int) -> str:
    # of a path, the end tells more
    if len(cell) <= size:
        return cell.ljust(size)
    return "…" + cell[1 - size :] if " " not in cell else cell[: size - 1] + "…"
