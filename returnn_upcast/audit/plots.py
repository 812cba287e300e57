"""
The pictures of a report: errors by variant, errors by call site against the rounding floor, magnitudes against the range.
"""

from __future__ import annotations
from typing import Any, Callable, List, Tuple
import io
import math
from .report import AuditReport, CallSite

MAX_SITES = 40
_STOCK, _UPCAST, _FLOOR = "#c44e52", "#4c72b0", "#888888"

# title, caption, whether there is something to draw, how to draw it, height in inches
Picture = Tuple[str, str, Callable[[Any], None], float]


def pictures(report: AuditReport) -> List[Picture]:
    """
    :return: those that the report has data for; each draws on matplotlib axes
    """
    sites = [s for s in report.sites if s.low and s.stock_error is not None]
    sites = sorted(sites, key=lambda s: -min(s.stock_error, 1e9))[:MAX_SITES]
    ranged = [s for s in sites if s.limit < math.inf and s.max_input > 0]
    result: List[Picture] = []
    fine = [v for v in report.variants if not v.error]
    if fine:
        text = f"Relative to {report.reference}. Shorter is better; dotted: how much the step differs from itself."
        result.append(("Errors by variant", text, lambda ax: _variants(ax, report), 1.2 + 0.5 * len(fine)))
    if sites:
        text = "Relative error against float64 on the same inputs. No result of that dtype can be left of its floor."
        result.append(("Error by call site", text, lambda ax: _errors(ax, sites), 1.2 + 0.24 * len(sites)))
    if ranged:
        text = "Largest magnitude of the inputs; the bar ends at the largest number of their dtype."
        result.append(("Magnitudes", text, lambda ax: _magnitudes(ax, ranged), 1.2 + 0.24 * len(ranged)))
    return result


def _finite(value: Any) -> Any:
    return value if value is not None and 0 < value < math.inf else math.nan


def _variants(ax: Any, report: AuditReport):
    fine = [v for v in report.variants if not v.error]
    series = [("gradient", [_finite(v.gradient_error) for v in fine])]
    for i, loss in enumerate(fine[0].losses):
        series.append((f"{loss.name} (loss)", [_finite(v.losses[i].difference) for v in fine]))
    series = [(name, values) for name, values in series if not all(map(math.isnan, values))]
    height = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series):
        ax.barh([y + i * height for y in range(len(fine))], values, height, label=name)
    for noise, style in zip(report.noise, (":", "--")):
        if _finite(noise.gradient) == noise.gradient:
            ax.axvline(noise.gradient, color="black", linestyle=style, label=f"noise of the gradient: {noise.kind}")
    names = [v.name + (f"\n({v.nonfinite} NaN/inf)" if v.nonfinite else "") for v in fine]
    ax.set_yticks([y + 0.4 - height / 2 for y in range(len(fine))], names)
    _finish(ax, f"relative difference to {report.reference}")


def _label(site: CallSite) -> str:
    return f"{site.op}  {site.path if len(site.path) < 50 else '…' + site.path[-49:]}"


def _errors(ax: Any, sites: List[CallSite]):
    rows = range(len(sites))
    for values, color, marker, name in (
        ([s.floor for s in sites], _FLOOR, "|", "floor"),
        ([s.upcast_error for s in sites], _UPCAST, "o", "upcast"),
        ([s.stock_error for s in sites], _STOCK, "x", "stock"),
    ):
        ax.plot([_finite(v) for v in values], rows, marker, color=color, label=name, linestyle="none")
    right = max([1.0, *(2 * s.stock_error for s in sites if s.stock_error < math.inf)])
    for y, site in enumerate(sites):
        if site.stock_error == math.inf:
            text = "stock: " + ("raises" if site.stock_exception else "NaN/inf")
            ax.text(right, y, text, color=_STOCK, va="center", ha="right", fontsize=8)
    ax.set_yticks(rows, [_label(s) for s in sites])
    _finish(ax, "relative error")


def _magnitudes(ax: Any, sites: List[CallSite]):
    rows = range(len(sites))
    ax.barh(rows, [s.limit for s in sites], color="#dddddd", label="range of the dtype")
    ax.barh(rows, [s.max_input for s in sites], 0.4, color=_UPCAST, label="largest input")
    ax.set_yticks(rows, [_label(s) for s in sites])
    _finish(ax, "magnitude")
    ax.set_xlim(left=min(s.max_input for s in sites) / 10)


def _finish(ax: Any, label: str):
    ax.set_xscale("log")
    ax.set_xlabel(label)
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="y", labelsize=8)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _figure(drawn: List[Picture]) -> Any:
    # no pyplot: that would choose a window system, and keep every figure
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, sum(height for *_, height in drawn)), layout="constrained")
    all_axes = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=[height for *_, height in drawn])
    for (title, _, draw, _), ax in zip(drawn, all_axes[:, 0]):
        draw(ax)
        if len(drawn) > 1:
            ax.set_title(title)
    return figure


def svg(picture: Picture) -> bytes:
    """:return: one picture"""
    buffer = io.BytesIO()
    _figure([picture]).savefig(buffer, format="svg")
    return buffer.getvalue()


def overview(report: AuditReport) -> bytes:
    """:return: PNG of all pictures, one below the other"""
    from matplotlib.figure import Figure

    drawn, buffer = pictures(report), io.BytesIO()
    if drawn:
        figure = _figure(drawn)
    else:
        figure = Figure(figsize=(11, 1.5))
        figure.text(0.5, 0.5, report.verdict[0], ha="center", va="center", wrap=True)
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
