"""``python -m cupy_paged plot RECORD.json``: pictures of a benchmark record, as SVG files that suit light and dark pages.

`roofline.svg` has a point for each shape against both measured ceilings, `latency-slots.svg` and `latency-tokens.svg`
the time against L and T, and `alternatives.svg` our time against the best peer and what ``--against`` has timed, where
the record has any. Needs matplotlib, the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import bench

# A mid grey and colours of middle lightness stand out against white and against near black; the ground is transparent.
INK = "#808080"
COLOURS = ("#2f81d6", "#d9772b", "#2f9e5b", "#b15fc9", "#c94f4f")
MARKERS = ("o", "s", "^", "D", "v")
STYLE = {
    "svg.fonttype": "none",  # text stays text: small files, and readers' own fonts
    "svg.hashsalt": "cupy_paged",  # equal records give equal files
    "savefig.transparent": True,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "axes.grid": True,
    "legend.frameon": False,
    "font.size": 10,
}


def _heads(rows: Iterable[dict[str, Any]]) -> list[int]:
    return sorted({r["num_heads"] for r in rows})


def intensity(row: dict[str, Any]) -> float:
    """Flops for each byte that has to be moved."""
    case = bench.Case(row["num_heads"], row["num_tokens"], row["length"])
    return bench.flops(case) / bench.moved_bytes(case)


def roofline(axes: Any, record: dict[str, Any]) -> None:
    rows, ceilings = record["rows"], record["ceilings"]
    matmul, gather = ceilings["matmul_tflops"], 0.9 * ceilings["copy_gbs"] / 1e3
    ridge = matmul / gather
    least = min([*map(intensity, rows), ridge]) / 2
    most = max([*map(intensity, rows), ridge]) * 2
    axes.plot([least, ridge, most], [least * gather, matmul, matmul], color=INK, linewidth=1.5)
    axes.text(most, matmul, f"matmul, {matmul:.0f} TFLOP/s", ha="right", va="bottom")
    axes.text(least, least * gather, f"  0.9 of copy, {1e3 * gather:.0f} GB/s", ha="left", va="top")
    for i, heads in enumerate(_heads(rows)):
        own = [r for r in rows if r["num_heads"] == heads]
        axes.plot(
            [intensity(r) for r in own],
            [r["tflops"] for r in own],
            MARKERS[i % len(MARKERS)],
            color=COLOURS[i % len(COLOURS)],
            label=f"H = {heads}",
            markersize=5,
        )
    axes.set(xscale="log", yscale="log", xlabel="flop / byte", ylabel="TFLOP/s", title="Achieved, and both ceilings")
    axes.legend()


def lines_of(rows: Sequence[dict[str, Any]], along: str, fixed: str) -> list[tuple[int, int, list[tuple[int, float]]]]:
    """(heads, value of `fixed`, [(value of `along`, us)]) of each series with two points or more."""
    found = []
    for heads in _heads(rows):
        for value in sorted({r[fixed] for r in rows}):
            points = sorted((r[along], r["us"]) for r in rows if r["num_heads"] == heads and r[fixed] == value)
            if len(points) > 1:
                found.append((heads, value, points))
    return found


def latency(axes: Any, record: dict[str, Any], along: str, fixed: str) -> None:
    letters = {"length": "L", "num_tokens": "T"}
    every = lines_of(record["rows"], along, fixed)
    # The series of the fixed value with the most points: one line for each number of heads.
    chosen = max(every, key=lambda s: (len(s[2]), s[1]))[1]
    colours = {h: i for i, h in enumerate(_heads(record["rows"]))}
    for heads, value, points in every:
        if value == chosen:
            i = colours[heads]
            axes.plot(
                *zip(*points, strict=True),
                marker=MARKERS[i % len(MARKERS)],
                color=COLOURS[i % len(COLOURS)],
                label=f"H = {heads}",
            )
    what = {"length": "slots of each token, L", "num_tokens": "tokens, T"}[along]
    axes.set(xscale="log", yscale="log", xlabel=what, ylabel="us", title=f"Time at {letters[fixed]} = {chosen}")
    axes.legend()


def rivals(record: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """For each alternative: (our us, its us) of the cases that both have."""
    ours = {(r["num_heads"], r["num_tokens"], r["length"]): r for r in record["rows"]}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        if row.get("peer_us") is not None:
            found.setdefault("best peer (recorded on an H200)", []).append((row["us"], row["peer_us"]))
    for row in record.get("alternatives", ()):
        own = ours.get((row["num_heads"], row["num_tokens"], row["length"]))
        if own is not None and "us" in row:
            found.setdefault(row["name"], []).append((own["us"], row["us"]))
    return found


def against(axes: Any, record: dict[str, Any]) -> None:
    found = rivals(record)
    times = [t for points in found.values() for pair in points for t in pair]
    axes.plot([min(times), max(times)], [min(times), max(times)], color=INK, linewidth=1)
    for i, (name, points) in enumerate(found.items()):
        axes.plot(*zip(*points, strict=True), MARKERS[i], color=COLOURS[i], label=name, markersize=5, linestyle="none")
    axes.set(
        xscale="log", yscale="log", xlabel="cupy_paged, us", ylabel="the other, us", title="Above the line: faster"
    )
    axes.legend()


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that a record has data for; returns their paths.

    Raises
    ------
    ValueError
        A record of another schema, of the NumPy backend, or without rows.
    """
    if record.get("schema") != bench.SCHEMA:
        raise ValueError(f"the record has schema {record.get('schema')}, this version draws {bench.SCHEMA}")
    if not record.get("rows") or "ceilings" not in record:
        raise ValueError("the record must hold rows and ceilings, as a run of bench on a GPU writes them")
    import matplotlib
    from matplotlib.figure import Figure

    pictures: dict[str, Any] = {"roofline": lambda axes: roofline(axes, record)}
    for name, along, fixed in (("slots", "length", "num_tokens"), ("tokens", "num_tokens", "length")):
        if lines_of(record["rows"], along, fixed):
            pictures[f"latency-{name}"] = lambda axes, a=along, f=fixed: latency(axes, record, a, f)
    if rivals(record):
        pictures["alternatives"] = lambda axes: against(axes, record)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, paint in pictures.items():
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            paint(figure.subplots())
            device = record.get("gpu", {}).get("device", "")
            figure.text(1, 0, device, ha="right", va="bottom", fontsize=7)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            paths.append(path)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_paged plot", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("record", type=Path, help="written by bench --json, or a GPU record")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write the SVG files; default: here")
    options = parser.parse_args(arguments)
    try:
        record = json.loads(options.record.read_text())
        paths = draw(record.get("benchmark", record), options.folder)
    except ImportError:
        print("plot needs matplotlib: pip install 'cupy-paged[bench]'", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"{options.record}: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(path)
    return 0
