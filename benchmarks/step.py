"""Compare a training step with FSDP2's, and with each rank computing alone, in one run: ``python benchmarks/step.py``.

Two gloo processes of one thread each are started for every size; nothing else is needed. All contenders train the same
model in turns, step by step, in an order that rotates, so that a busy machine slows them alike; every number is a
median. The sizes:

- ``unit``: software cost of a unit, in one process without communication.
- ``overhead``: 12 tiny blocks (d=64, 16 tokens): what software and many small collectives cost.
- ``compute``: 12 layers of d=512, 42M parameters, 256 tokens on each rank.
- ``wide``: 4 layers of d=1024, 51M parameters, 256 tokens on each rank.

``cpu_ratio`` and ``wall_ratio`` are ours over FSDP2's (default settings), of forward, backward and all reductions;
``..._with_optimizer`` adds the AdamW step, and ``wall_over_floor`` divides by the time of each rank computing alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.multiprocessing as mp

from benchmarks import measure, unit_cost
from benchmarks.contenders import FACADE, FLOOR, OURS

CHOICES = ("unit", "overhead", "compute", "wide")
UNIT_STEPS = 40
UNIT_WARMUP = 3
QUICK_STEPS = 4


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=(*CHOICES, "all"), help="may be repeated; default: all")
    parser.add_argument("--steps", type=int, help="timed steps of each contender; each size has its own default")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    sizes = CHOICES if not args.size or "all" in args.size else [c for c in CHOICES if c in args.size]
    report = run(sizes, args.steps or (QUICK_STEPS if args.quick else None), 1 if args.quick else None)
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def run(sizes: Sequence[str], steps: int | None, warmup: int | None) -> dict[str, Any]:
    """Measure each of the sizes; ``steps`` and ``warmup`` None take each one's default.

    Returns:
        By size what `measure.compare` and `unit_cost.measure` give, and ``machine``. ``unit_cost_ratio`` is also under
        ``overhead``.
    """
    report: dict[str, Any] = {"machine": machine()}
    for name in sizes:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        if name == "unit":
            report["unit"] = _unit(steps or UNIT_STEPS, warmup or UNIT_WARMUP)
        else:
            size = measure.SIZES[name]
            report[name] = measure.compare(replace(size, steps=steps or size.steps, warmup=warmup or size.warmup))
    if "unit" in report:
        report.setdefault("overhead", {})["unit_cost_ratio"] = report["unit"]["unit_cost_ratio"]
    return report


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "load_average": os.getloadavg()[0],
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    m = report["machine"]
    lines = [f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, load {m['load_average']:.1f} at the start"]
    if "unit" in report:
        lines += ["", *_unit_table(report["unit"])]
    for name in ("overhead", "compute", "wide"):
        if "contenders" in report.get(name, {}):
            lines += ["", *_size_table(name, report[name])]
    return "\n".join(lines)


def _size_table(name: str, r: dict[str, Any]) -> list[str]:
    size = r["size"]
    lines = [
        f"{name}: {size['layers']} layers of d={size['dim']}, {r['parameters'] / 1e6:.1f}M parameters, "
        f"{size['batch'] * size['seq_len']} tokens a rank, {r['steps']} steps",
        f"  {'':16}{'wall ms':>10}{'cpu ms':>10}{'wall/floor':>12}{'+optimizer: wall, cpu ms':>26}"
        f"{'peak MB':>10}{'gathers':>9}{'scatters':>9}",
    ]
    floor = r["contenders"][FLOOR]["wall_ms"]
    for who, c in r["contenders"].items():
        counts = c["collectives"]
        with_optimizer = f"{c['wall_ms_with_optimizer']:.1f}, {c['cpu_ms_with_optimizer']:.1f}" if who != FLOOR else "-"
        lines.append(
            f"  {who:16}{c['wall_ms']:10.1f}{c['cpu_ms']:10.1f}{c['wall_ms'] / floor:12.2f}{with_optimizer:>26}"
            f"{c['peak_bytes'] / 1e6:10.2f}{counts.get('all_gather', 0):9}{counts.get('reduce_scatter', 0):9}"
        )
    f = r["facade"]
    lines += [
        _ratios(OURS, r),
        _ratios(FACADE, f),
        f"  {FACADE} / {OURS}: cpu {f['cpu_ratio_to_ours']:.2f}, wall {f['wall_ratio_to_ours']:.2f}; with optimizer "
        f"cpu {f['cpu_ratio_to_ours_with_optimizer']:.2f}, wall {f['wall_ratio_to_ours_with_optimizer']:.2f}",
        f"  losses {'equal, bit for bit' if r['losses_equal'] else 'DIFFER'}; "
        f"collectives {'equal' if r['collectives_equal'] else 'DIFFER'}",
    ]
    return lines


def _ratios(who: str, r: dict[str, Any]) -> str:
    return (
        f"  {who} / fsdp2: cpu {r['cpu_ratio']:.2f}, wall {r['wall_ratio']:.2f}; with optimizer cpu "
        f"{r['cpu_ratio_with_optimizer']:.2f}, wall {r['wall_ratio_with_optimizer']:.2f}; peak bytes "
        f"{r['peak_bytes_ratio']:.3f}"
    )


def _unit_table(r: dict[str, Any]) -> list[str]:
    lines = [
        f"unit: {unit_cost.UNITS} x Linear({unit_cost.WIDTH}, {unit_cost.WIDTH}), CPU microseconds a unit, "
        f"{r['steps']} steps",
        f"  {'':16}{'forward':>10}{'backward':>10}{'total':>10}{'over floor':>12}{'a further parameter':>21}"
        f"{'buffers above state':>21}",
    ]
    for who, c in r["cost"].items():
        buffers = f"{r['buffers'][who]:.2f} units" if who in r["buffers"] else "-"
        lines.append(
            f"  {who:16}{c['forward']:10.0f}{c['backward']:10.0f}{c['total']:10.0f}{c['net']:12.0f}"
            f"{c['further_parameter']:21.1f}{buffers:>21}"
        )
    f = r["facade"]
    lines += [
        f"  {who} / fsdp2: total {x['unit_cost_ratio']:.2f}, over floor {x['unit_cost_ratio_net']:.2f}; "
        f"peak bytes {x['buffers_ratio']:.3f}"
        for who, x in ((OURS, r), (FACADE, f))
    ]
    lines.append(
        f"  {FACADE} / {OURS}: total {f['unit_cost_ratio_to_ours']:.2f}, "
        f"over floor {f['unit_cost_ratio_net_to_ours']:.2f}"
    )
    return lines


def _unit(steps: int, warmup: int) -> dict[str, Any]:
    """`unit_cost.measure` in a process of its own, as its process group is no real one."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "unit.json"
        mp.spawn(_unit_worker, args=(steps, warmup, path), nprocs=1)
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def _unit_worker(_: int, steps: int, warmup: int, path: Path) -> None:
    path.write_text(json.dumps(unit_cost.measure(steps, warmup)))


if __name__ == "__main__":
    main()
