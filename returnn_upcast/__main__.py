"""
``python -m returnn_upcast explain | audit | cast | convert | inspect | compare``, see ``--help`` of each.
"""

from __future__ import annotations
from typing import List, Optional
import argparse
import sys
from . import config, hooks, patch
from .audit import cli as audit_cli
from .checkpoint import cli as checkpoint_cli
from .version import __version__


def explain(args: argparse.Namespace) -> int:
    """
    Prints what a config means: versions, the policy per op with its reason, and the hooks in place.

    :param args: config, options
    :return: exit code, 2 if the config does not exist or raises
    """
    from returnn import __main__ as returnn_main
    import returnn

    try:
        returnn_main.init_config(config_filename=args.config, command_line_options=args.options)
        policy = config.explain()
        backend = returnn_main.config.typed_value("backend")
        if backend == "torch":
            import returnn.frontend as rf

            rf.select_backend_torch()
    except (Exception, SystemExit) as exc:
        print(f"explain: {args.config}: {type(exc).__name__}: {' '.join(str(exc).split())}", file=sys.stderr)
        return 2
    import torch

    print(f"RETURNN {returnn.__version__}, torch {torch.__version__}, returnn_upcast {__version__}")
    if not hooks.is_installed():
        print("The config does not call returnn_upcast.install(): nothing is hooked, the policy has no effect.")
    if backend != "torch":
        print(f"The config has backend = {backend!r}: only the torch backend has hooks.")
    print("\nop                    float32  why")
    for op, (on, why) in policy.items():
        print(f"{op:<20}  {'on' if on else 'off':<7}  {why}")
    print(f"\nhooked ({len(patch.applied())}):")
    for item in patch.applied():
        print(f"  {item}")
    return 0


def main(argv: Optional[List[str]] = None) -> int:
    """
    :param argv: without the program's name
    :return: exit code
    """
    parser = argparse.ArgumentParser(prog="python -m returnn_upcast", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("explain", help="what a config means: the policy per op, why, and what is hooked")
    sub.add_argument("config", help="RETURNN config file")
    sub.add_argument("options", nargs=argparse.REMAINDER, help="as for RETURNN: ++rf_upcast False ...")
    sub.set_defaults(func=explain)
    audit_cli.add_commands(commands)
    checkpoint_cli.add_commands(commands)
    args = parser.parse_args(argv)
    return args.func(args)


if __name__ == "__main__":
    sys.exit(main())
