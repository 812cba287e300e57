"""
``python -m returnn_upcast audit CONFIG``.
"""

from __future__ import annotations
from typing import Any, List, Optional, Tuple
import argparse
import os
import sys
import time

_USAGE = (
    "%(prog)s CONFIG [++opt value ...] [--steps N] [--checkpoint FILE] [--reference float64] "
    "[--json OUT] [--html OUT] [--plot OUT.png]"
)


def add_commands(commands: Any):
    """
    :param commands: the subparsers of ``python -m returnn_upcast``
    """
    text = "trains some batches of a config with the upcast off, on, and in float32: does it matter for my model?"
    sub = commands.add_parser("audit", help=text, description=text, usage=_USAGE)
    sub.add_argument("config", help="RETURNN config file")
    sub.add_argument(
        "options", nargs=argparse.REMAINDER, help="of the audit, and as for RETURNN: ++rf_upcast False ..."
    )
    sub.set_defaults(func=main)


def _own_options(options: List[str]) -> Tuple[argparse.Namespace, List[str]]:
    """:return: the options of the audit, and those of RETURNN"""
    parser = argparse.ArgumentParser(prog="python -m returnn_upcast audit", usage=_USAGE, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=3, help="number of batches (default 3)")
    parser.add_argument("--checkpoint", help="model to load; default: what RETURNN would load")
    parser.add_argument("--reference", choices=["float32", "float64"], default="float32")
    parser.add_argument("--json", help="file for the report as JSON")
    parser.add_argument("--html", help="file for the report as a web page")
    parser.add_argument("--plot", help="file for the pictures as PNG")
    args, rest = parser.parse_known_args(options)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    unknown = [x for x in rest if x.startswith("--")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; options of RETURNN start with ++")
    return args, rest


class _Progress:
    # one line that is overwritten on a terminal, lines with the time otherwise
    def __init__(self):
        self._start, self._tty = time.monotonic(), sys.stderr.isatty()

    def __call__(self, text: str):
        line = f"audit: {time.monotonic() - self._start:5.1f} s  {text}"
        print(f"\r\033[K{line}" if self._tty else line, end="" if self._tty else "\n", file=sys.stderr, flush=True)

    def done(self):
        """ends the line"""
        if self._tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    """
    :param args: config, options
    :return: exit code, 2 if there is nothing to audit or it fails
    """
    own, options = _own_options(args.options)
    for path in filter(None, (own.json, own.html, own.plot)):
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            return _fail(f"{path}: {folder} is no directory")
    if own.plot or own.html:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return _fail("pictures need matplotlib: pip install returnn_upcast[audit]")
    progress = _Progress()
    report = _report(args.config, options, own, progress)
    if report is None:
        return 2
    print(report)
    _write(report, own)
    return 0


def _fail(message: str, trace: str = "") -> int:
    if trace:
        print(trace, file=sys.stderr, end="" if trace.endswith("\n") else "\n")
    print(f"audit: {message}", file=sys.stderr)
    return 2


def _report(config: str, options: List[str], own: argparse.Namespace, progress: _Progress) -> Optional[Any]:
    from .engine import ConfigError, load
    from .run import audit
    from .variants import StepError

    try:
        setup = load(config, options, steps=own.steps, checkpoint=own.checkpoint, progress=progress)
        return audit(setup, name=os.path.basename(config), reference=own.reference, progress=progress)
    except (ConfigError, StepError) as exc:
        progress.done()
        _fail(f"{config}: {exc}" if isinstance(exc, StepError) else str(exc), exc.trace)
        return None
    finally:
        progress.done()


def _write(report: Any, own: argparse.Namespace):
    if own.json:
        with open(own.json, "w", encoding="utf8") as file:
            file.write(report.to_json() + "\n")
    if own.html:
        from .html import page

        with open(own.html, "w", encoding="utf8") as file:
            file.write(page(report))
    if own.plot:
        from .plots import overview

        with open(own.plot, "wb") as file:
            file.write(overview(report))


if __name__ == "__main__":
    parser_ = argparse.ArgumentParser(prog="python -m returnn_upcast")
    add_commands(parser_.add_subparsers(required=True))
    sys.exit(main(parser_.parse_args(["audit", *sys.argv[1:]])))
