#!/usr/bin/env python
"""
Stock RETURNN against returnn_upcast, interleaved in one run: time of forward and backward, and bytes kept for backward.

  python demos/demo-benchmark.py                     all cases, on the CPU
  python demos/demo-benchmark.py --device cuda norm  cases with "norm" in their name, on the GPU
  python demos/demo-benchmark.py --json out.json --plot out.png     (--plot needs the extra: returnn_upcast[plot])

Ratios are upcast over stock, each pair of runs side by side; the spread is that of their quartiles.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List, Sequence
import argparse
import json
import platform
import statistics
import sys
import time
import torch
import returnn
import returnn.frontend as rf
from returnn.util.basic import BehaviorVersion
import returnn_upcast
from benchmark_cases import CASES, Case, Maker


def kept_bytes(func: Callable[[], torch.Tensor], own: Sequence[torch.Tensor]) -> int:
    """:return: bytes that the forward keeps for backward, the leaves aside"""
    leaves = {t.untyped_storage().data_ptr() for t in own}
    kept: Dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in leaves:
            kept[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = func()
    size = sum(storage.nbytes() for storage in kept.values())
    del out
    return size


def timed_step(func: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], device: str) -> float:
    """:return: seconds of one forward and backward"""
    for leaf in leaves:
        leaf.grad = None
    start = time.perf_counter()
    out = func()
    out.backward(torch.ones_like(out))
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(build: Callable[[Maker], Case], make: Maker, runs: int, warmup: int = 3) -> Dict[str, Any]:
    """:return: medians, ratios and their spread"""
    func, leaves = build(make)
    times: Dict[bool, List[float]] = {False: [], True: []}
    kept = {}
    for run in range(-warmup, runs):
        for on in (False, True):
            with rf.upcast.scope(on):
                seconds = timed_step(func, leaves, make.device)
                if run >= 0:
                    times[on].append(seconds)
    for on in (False, True):
        with rf.upcast.scope(on):
            kept[on] = kept_bytes(func, leaves)
    ratios = [ours / stock for stock, ours in zip(times[False], times[True])]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "stock_ms": statistics.median(times[False]) * 1e3,
        "upcast_ms": statistics.median(times[True]) * 1e3,
        "time_ratio": median,
        "time_ratio_quartiles": [low, high],
        "stock_mib": kept[False] / 2**20,
        "upcast_mib": kept[True] / 2**20,
    }


def plot(results: Dict[str, Dict[str, Any]], title: str, path: str):
    """Writes a bar chart of the ratios."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'returnn_upcast[plot]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(results)[::-1]
    fig, axis = plt.subplots(figsize=(8, 0.4 * len(names) + 1.5), layout="constrained")
    axis.barh(names, [results[n]["time_ratio"] for n in names], color="#4477aa")
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_xlabel("time of forward and backward, upcast / stock RETURNN")
    axis.set_title(title, fontsize=9)
    fig.savefig(path, dpi=120)


def main():
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of names; default: all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--plot", help="write a picture there")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no GPU")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rf.select_backend_torch()
    BehaviorVersion.set(38)
    rf.init_train_step_run_ctx(train_flag=True, step=0)
    returnn_upcast.install()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    title = f"RETURNN {returnn.__version__}, torch {torch.__version__}, {args.dtype}, {machine}, {args.runs} runs"
    print(
        title
        + "\n\n| case | stock ms | upcast ms | time ratio (quartiles) | kept MiB, stock | upcast |\n|---|---|---|---|---|---|"
    )
    results = {}
    for name, build in CASES.items():
        if not args.cases or any(part.lower() in name.lower() for part in args.cases):
            r = results[name] = measure(build, Maker(args.device, getattr(torch, args.dtype)), args.runs)
            low, high = r["time_ratio_quartiles"]
            print(
                f"| {name} | {r['stock_ms']:.1f} | {r['upcast_ms']:.1f} | {r['time_ratio']:.2f} ({low:.2f} to {high:.2f})"
                f" | {r['stock_mib']:.1f} | {r['upcast_mib']:.1f} |",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"title": title, "results": results}, file, indent=2)
    if args.plot:
        plot(results, title, args.plot)


if __name__ == "__main__":
    main()
