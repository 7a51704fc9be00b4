"""Every kernel, small shapes and hostile inputs, under compute-sanitizer.

    python tests/sanitize.py                 memcheck, racecheck, initcheck and synccheck, one after another
    python tests/sanitize.py memcheck        one of them
    python tests/sanitize.py --inside all    the matrix itself, without the sanitizer

The matrix runs once without the sanitizer first, which compiles its kernels. initcheck and synccheck, which slow
every access of memory or every barrier, take a smaller matrix of the same kernels. Progress is printed as it comes; a
tool that exceeds its time limit is stopped, and that is its outcome.

Every array is an allocation of its own (CuPy's memory pool is off), so that one byte beyond it is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import faults  # noqa: E402
import numpy as np  # noqa: E402
from faults import BF16, F32, FP16, INT_MAX, INT_MIN, Backend, Config, base  # noqa: E402

import cupy_paged  # noqa: E402

TOOLS = {  # options, matrix
    "memcheck": (["--leak-check", "no"], "all"),
    "racecheck": (["--racecheck-report", "all"], "all"),
    "initcheck": ([], "few"),
    "synccheck": ([], "few"),
}
LIMIT = 240  # seconds a tool
CONFIGS = [
    Config(),
    Config(num_heads=64),
    Config(num_heads=128),
    Config(num_heads=128, kv="16"),
    Config(num_heads=3, head_dim=64, page_size=4, q_dtype=FP16, group_size=32),
    Config(num_heads=17, head_dim=448, page_size=3, group_size=64),
    Config(num_heads=40, head_dim=256, kv="16", q_dtype=FP16),
]
FEW = [CONFIGS[i] for i in (0, 2, 3, 4)]  # each form of the kernel, of its widening and of its copies
LENGTHS = [0, 1, 31, 33, 65, 200]
INDPTR = {
    "decreasing": [60, 50, 40, 30, 20, 10, 0],
    "beyond": [0, 40, 80, INT_MAX, INT_MAX, INT_MAX, INT_MAX],
    "negative": [INT_MIN, -1, -1, 5, INT_MIN, 40, 41],
    "zigzag": [0, 330, 0, 330, 0, 330, 0],
}


def decoding(gpu, few):
    modes = [{}, {"num_splits": 3}, {"batch_invariant": True}]
    for config, mode in itertools.product(FEW if few else CONFIGS, modes[:2] if few else modes):
        call = base(config, lengths=LENGTHS, num_slots=300)
        sink = np.linspace(-1, 1, config.num_heads, dtype=F32)
        out, lse = gpu.decode(call, attn_sink=sink, **mode)
        faults.near_reference(call, out, lse, sink)
        yield "decode"
        hostile = [{"kv_indptr": np.array(v, np.int32)} for v in INDPTR.values()]
        wild = np.resize([INT_MIN, -1, 0, 299, 300, 10**6, INT_MAX], 330).astype(np.int32)
        changes = [*hostile, {"kv_indices": wild}, {"kv_indices": wild, "kv_indptr": hostile[3]["kv_indptr"]}]
        for change in changes[-1:] if few else changes:
            changed = call | change
            out = np.zeros(call["q"].shape, call["q"].dtype)  # a malformed row may be left out, not half-written
            # What fixed splits of malformed rows give may come from the workspace: let it be initialised.
            fixed = gpu.zero_workspace(1 << 24) if mode else {}
            got, _ = gpu.decode(changed, out=out, **mode, **fixed)
            assert np.isfinite(got.astype(F32)).all()
            yield "hostile decode"


def merging(gpu):
    call = base(lengths=[40, 0, 3])
    out, lse = gpu.decode(call)
    cupy_paged.merge_states([gpu.put(out)] * 3, [gpu.put(lse)] * 3, gpu.put(np.zeros(16, F32)))[0].get()
    yield "merge"


def storing(gpu):
    rng = np.random.default_rng(0)
    for page_size, dtype, rows_dtype, d in (
        (1, "float8_e4m3fn", BF16, 512),
        (1, "float8_e4m3fn", F32, 64),
        (16, "float8_e4m3fn", BF16, 512),
        (3, "float8_e4m3fn", FP16, 192),
        (16, "bfloat16", F32, 512),
    ):
        pool = cupy_paged.PagedKV(9, page_size, d, dtype=dtype, device="cuda")
        slots = rng.integers(0, 9 * page_size, 40)
        slots[::4] = np.resize([-1, 9 * page_size, INT_MIN, INT_MAX, 2**40 + 3, -(2**63)], 10)
        rows = gpu.put(rng.standard_normal((40, d)).astype(rows_dtype))
        cos, sin = gpu.put(np.cos(np.ones((50, 32), F32))), gpu.put(np.sin(np.ones((50, 32), F32)))
        positions = gpu.put(rng.integers(-2, 60, 40))
        pool.store(gpu.put(slots), rows)
        pool.store(gpu.put(slots.astype(np.int32)), rows, positions=positions, cos=cos, sin=sin, interleaved=False)
        pool.dequantize(gpu.put(slots), "bfloat16").get()
        pool.dequantize().get()
        pages = gpu.put(np.array([0, 8, 9, -1, INT_MAX, 3], np.int32))
        pool.copy_pages(pages, pages[::-1].copy())
        pool.copy_slots(gpu.put(slots), gpu.put(slots[::-1].copy()))
        pool.grow(12)
        if dtype.startswith("float8"):
            kv = rows[: 36 // page_size * page_size].reshape(-1, page_size, d)
            cupy_paged.dequantize_kv(*cupy_paged.quantize_kv(kv)).get()
        heads = gpu.put(rng.standard_normal((40, 5, d)).astype(rows_dtype))
        cupy_paged.inverse_rope(cupy_paged.apply_rope(heads, positions, cos, sin), positions, cos, sin).get()
        yield "store, read, copy, rotate"


def building(gpu):
    rng = np.random.default_rng(1)
    for name in ("int32", "int64"):
        bad = [-1, 0, 5, INT_MAX] if name == "int32" else [-1, 0, 5, 2**40, -(2**63), 2**63 - 1]
        table = gpu.put(np.resize(bad, (7, 9)).astype(name))
        lens = gpu.put(np.array([0, 1, 35, 36, INT_MAX, -5, INT_MIN], name))
        cupy_paged.lists_from_page_table(table, lens, 4)[0].get()
        cupy_paged.lists_from_page_table(table, lens, 4, capacity=20)[0].get()
        cupy_paged.lists_from_padded(table, lens)[0].get()
        cupy_paged.lists_from_padded(table, capacity=5)[0].get()
        positions, sequences = (
            gpu.put(np.array([-1, 0, 3, 200, INT_MAX, 5, 9], name)),
            gpu.put(np.resize(bad, 7).astype(name)),
        )
        rings = gpu.put(rng.integers(0, 99, 7).astype(name))
        for options in ({}, {"page_table": table, "ratio": 4, "page_size": 3}, {"topk": table, "ratio": 4},
                        {"page_table": table, "topk": table, "num_entries": lens}):  # fmt: skip
            cupy_paged.lists_for_v4(positions, sequences, rings, window=8, **options)[0].get()
        yield "lists"


def inside(matrix):
    import cupy

    cupy.cuda.set_allocator(None)
    gpu, counts, begin = Backend("cuda"), {}, time.monotonic()
    for name in itertools.chain(decoding(gpu, matrix == "few"), merging(gpu), storing(gpu), building(gpu)):
        counts[name] = counts.get(name, 0) + 1
        print(f"  {time.monotonic() - begin:6.1f} s: {name} {counts[name]}", flush=True)
    cupy.cuda.Device().synchronize()
    print(f"matrix: {counts}", flush=True)


def follow(command, limit, show):
    """(exit status, or None where `limit` seconds were not enough; all output) of a command, shown line by line."""
    lines, done = [], threading.Event()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    ) as process:

        def stop():
            done.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the tool and the process it watches

        timer = threading.Timer(limit, stop)
        timer.start()
        for line in process.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)
        status = process.wait()
        timer.cancel()
    return None if done.is_set() else status, "".join(lines)


def sanitize(tool, limit=LIMIT, show=False):
    """Run the matrix under one tool: {'command', 'summary', 'matrix', 'seconds', 'clean'}; where it is not clean,
    'output' holds the end of what it printed."""
    options, matrix = TOOLS[tool]
    script = [str(ROOT / "tests" / "sanitize.py"), "--inside", matrix]
    tool_options = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9", "--print-limit", "20"]
    begin = time.monotonic()
    status, text = follow([sys.executable, *script], limit, show)
    if status == 0:
        begin = time.monotonic()
        status, text = follow([*tool_options, sys.executable, *script], limit, show)
    else:
        text += "(without the sanitizer)\n"
    seconds = round(time.monotonic() - begin)
    found = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
    ran = re.findall(r"^matrix: (.*)", text, re.MULTILINE)
    steps = re.findall(r"^ +[\d.]+ s: (.*)", text, re.MULTILINE)
    clean = bool(status == 0 and ran and found) and bool(
        re.match(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", found[-1])
    )
    summary = found[-1] if found else "no summary"
    if status is None:
        summary = f"stopped after {limit} s, {len(steps)} steps done"
    return {
        "command": " ".join([*tool_options, "python", "tests/sanitize.py", "--inside", matrix]),
        "summary": summary,
        "matrix": ran[-1] if ran else f"{len(steps)} steps, the last: {steps[-1] if steps else 'none'}",
        "seconds": seconds,
        "clean": clean,
        **({} if clean else {"output": text[-4000:]}),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="tool", help=", ".join(TOOLS))
    parser.add_argument("--inside", choices=["all", "few"])
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a tool")
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(arguments.inside)
    if not shutil.which("compute-sanitizer"):
        raise SystemExit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    outcomes = [sanitize(tool, arguments.limit, show=True) for tool in arguments.tools or TOOLS]
    for outcome in outcomes:
        print({name: value for name, value in outcome.items() if name != "output"}, flush=True)
    return int(not all(outcome["clean"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
