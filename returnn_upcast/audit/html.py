"""
The report as one web page with everything inside: no script, nothing is loaded.
"""

from __future__ import annotations
from typing import Any, Iterable, Sequence
import base64
import html
from . import causes, plots
from .report import AuditReport, CallSite, Variant
from .table import by_effect, number

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.meta { color: #666; } .verdict li { margin: .35rem 0; } .verdict li:first-child { font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #eee; vertical-align: top; }
th { background: #f6f6f6; position: sticky; top: 0; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
tr.broken td { background: #fdecec; } td.name { font-family: monospace; } img { max-width: 100%; }
figure { margin: 1rem 0; } figcaption { color: #666; } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; }
"""

_SITE_HEAD = (
    "op", "where", "stock", "upcast", "floor", "cause", "dtypes: in, inside, out", "shapes", "max in", "max out",
    "NaN/inf born: stock, upcast", "calls", "line",
)  # fmt: skip


def page(report: AuditReport) -> str:
    """
    :param report: to show
    :return: HTML text
    """
    body = [
        f"<h1>Audit of {_text(report.name)}</h1>",
        f"<p class='meta'>{_text(_meta(report))}</p>",
        "<ol class='verdict'>" + "".join(f"<li>{_text(line)}</li>" for line in report.verdict) + "</ol>",
        *(_figure(picture) for picture in plots.pictures(report)),
    ]
    if report.variants:
        body += ["<h2>Variants</h2>", _variants(report), *(_traceback(v) for v in report.variants if v.traceback)]
    if report.sites:
        note = (
            "Red: stock is wrong there, not only less precise. Errors are relative, against float64 on the same inputs."
        )
        body += ["<h2>Call sites</h2>", f"<p class='meta'>{note}</p>", _sites(report.sites)]
    if report.autocast:
        devices = list(report.autocast)
        rows = [[op, *(report.autocast[d].get(op, "?") for d in devices)] for op in report.autocast[devices[0]]]
        body += [
            "<h2>What autocast does by itself</h2>",
            "<p class='meta'>Dtype of the result of low-precision inputs.</p>",
        ]
        body += [_table(["function", *devices], rows)]
    if report.notes:
        body += ["<h2>Notes</h2>", "<ul>" + "".join(f"<li>{_text(n)}</li>" for n in report.notes) + "</ul>"]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{_text(report.name)}: audit</title>"
    return f"<!doctype html>\n<html lang='en'><head>{head}<style>{_STYLE}</style></head>\n<body>{_join(body)}</body></html>\n"


def _join(parts: Iterable[str]) -> str:
    return "\n".join(parts)


def _text(value: Any) -> str:
    return html.escape(str(value))


def _meta(report: AuditReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    what = f"{report.precision}; on {report.device}; reference {report.reference}"
    return f"{what}; batches: {'; '.join(report.batches)}; {versions}; took {report.seconds:.0f} s"


def _figure(picture: plots.Picture) -> str:
    data = base64.b64encode(plots.svg(picture)).decode()
    title, caption = map(_text, picture[:2])
    image = f"<img alt='{title}' src='data:image/svg+xml;base64,{data}'>"
    return f"<h2>{title}</h2><figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], broken: Sequence[bool] = ()) -> str:
    lines = ["<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>"]
    for i, row in enumerate(rows):
        kind = " class='broken'" if i < len(broken) and broken[i] else ""
        lines.append(f"<tr{kind}>" + "".join(_cell(cell) for cell in row) + "</tr>")
    return f"<div class='scroll'><table>{_join(lines)}</table></div>"


def _cell(cell: str) -> str:
    is_number = cell in ("-", "inf", "nan") or cell.replace(".", "").replace("-", "").replace("e", "").isdigit()
    return f"<td{' class=n' if is_number else ''}>{_text(cell)}</td>"


def _variants(report: AuditReport) -> str:
    names = list(dict.fromkeys(loss.name for v in report.variants for loss in v.losses))
    head = ["variant", "gradient error", "median over parameters"]
    for name in names:
        head += [name, f"{name}, difference"]
    head += ["s/step", f"MiB {report.memory_kind}", "NaN/inf", "worst parameters"]
    rows = [_variant(v, names) for v in report.variants]
    reference = ["reference", "-", "-"]
    losses = {loss.name: loss.reference for v in report.variants for loss in v.losses}
    for name in names:
        reference += [f"{losses[name]:.6g}", "-"]
    rows.insert(0, [*reference, "-", "-", "-", ""])
    return _table(head, rows, [False, *(bool(v.error) or v.nonfinite > 0 for v in report.variants)])


def _variant(v: Variant, names: Sequence[str]) -> Sequence[str]:
    losses = {loss.name: loss for loss in v.losses}
    cells = [v.name, "-" if v.error else number(v.gradient_error), number(v.median_param_error)]
    for name in names:
        cells += [f"{losses[name].value:.6g}", number(losses[name].difference)] if name in losses else ["-", "-"]
    memory = None if v.memory is None else v.memory / 2**20
    worst = v.error or ", ".join(f"{p.name} {number(p.error)}" for p in v.worst_params)
    return [*cells, number(v.seconds), number(memory), "-" if v.error else str(v.nonfinite), worst]


def _traceback(v: Variant) -> str:
    return f"<details><summary>{_text(v.name)}: {_text(v.error)}</summary><pre>{_text(v.traceback)}</pre></details>"


def _sites(sites: Sequence[CallSite]) -> str:
    ordered = by_effect(sites)
    return _table(_SITE_HEAD, map(_site, ordered), [causes.is_broken(s) for s in ordered])


def _site(s: CallSite) -> Sequence[str]:
    lost = f"{s.lost_before}, at {s.lost_line or s.line}: use {s.helper}" if s.lost_before else ""
    limit = "" if s.limit > 1e300 else f" of {s.limit:.3g}"
    return [
        s.op,
        s.path,
        *(number(x) for x in (s.stock_error, s.upcast_error, s.floor)),
        "; ".join(filter(None, (s.cause, lost))),
        ", ".join(["/".join(dict.fromkeys(s.dtypes_in)) or "-", s.dtype_inside or "-", s.dtype_out or "-"]),
        " ".join(s.shapes),
        number(s.max_input) + limit,
        number(s.max_output),
        f"{s.stock_nonfinite}, {s.upcast_nonfinite}",
        str(s.calls),
        s.line,
    ]
