"""The summary of the evidence: fault cases with their tests and outcomes, sanitizer, fuzzer, errors.

python tests/trust.py > tests/TRUST.md      after a new GPU record
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RECORD = TESTS / "gpu_record.json"
LACKING = "not in this record"
ABOUT_ERRORS = (
    "`call`: relative Frobenius error of all of a call's outputs, which the bound in each heading limits; `row`: the "
    "largest of one token's head; `lse`: the largest absolute error. The bound of bf16 is the contract's 2.5e-3, of "
    "which rounding the output to bf16 takes 1.7e-3; fp16 rounds eight times finer; pools of 16 bits round the "
    "probabilities to the pool's type as well."
)
CASES = {
    1: "empty rows left unwritten or NaN",
    2: "-1 read from the row before the pool",
    3: "page offsets wrap in 32 bits",
    4: "strides of pool, scales, q and out ignored",
    5: "strides of lists ignored",
    6: "all-zero group gives scale 0 and NaN",
    7: "scales narrowed to powers of two",
    8: "cast beyond 448 gives NaN",
    9: "bytes of another FP8 format read as e4m3fn",
    10: "few or odd head counts without a kernel",
    11: "head dimensions unsupported or mixed up",
    12: "sink counted twice, or not, with splits",
    13: "sink accepted and ignored",
    14: "lse in base 2, merges drift",
    15: "CUDA graph keeps the split count of its capture",
    16: "first call inside a capture",
    17: "launches on stream 0",
    18: "arrays on another device than the current",
    19: "no tokens: zero grid, sticky error",
    20: "bits depend on batchmates",
    21: "slots and offsets beyond the arrays",
    22: "codes copied without their scales",
    23: "store to bad slots writes out of bounds",
    24: "NaN of unused slots reaches the output",
    25: "processes share a compile cache; damaged, full and read-only caches",
    26: "NVRTC or headers missing",
    27: "architectures refused or unknown",
    28: "scalars of another type read wrongly",
    29: "bf16 and FP8 tensors of other libraries",
    30: "a DLPack capsule consumed twice",
    31: "arrays on the host, or that require gradients",
    32: "int64 lengths read as int32",
    33: "more rows than a grid axis holds",
    34: "workspace too small, or overrun",
    35: "host cost of a warm call",
    36: "time grows with the pool",
    37: "list builders drift from page tables",
    38: "a head group reads the next token's list",
}


def named():
    """{case: its test functions} from the sources."""
    found = collections.defaultdict(list)
    for file in sorted(TESTS.glob("test_fault_cases_*.py")):
        for name, case in re.findall(r"^def (test_o(\d\d)_\w+)", file.read_text(), re.MULTILINE):
            found[int(case)].append((file.name, name))
    return found


def page(record):
    tests, found = record["tests"], named()
    lines = [
        "# Evidence",
        "",
        f"From the GPU run of {record['written'][:10]} on {record['gpu'].get('device', 'a GPU')} "
        f"(`tests/gpu_record.json`); {len(tests)} GPU tests. The NumPy variants run in CI.",
        "",
        "| case | report | tests | on the GPU |",
        "|---|---|---|---|",
    ]
    for case, title in CASES.items():
        counts = collections.Counter()
        for file, name in found[case]:
            for node, outcome in tests.items():
                if f"/{file}::{name}" in node and re.search(rf"::{name}(\[|$)", node):
                    counts[outcome] += 1
        outcome = ", ".join(f"{n} {text}" for text, n in counts.most_common()) or "needs no GPU"
        names = ", ".join(f"`{name}`" for _, name in found[case])
        lines.append(f"| O{case:02} | {title} | {names} | {outcome} |")
    lines += ["", "## Sanitizer", ""]
    lines += [
        f"- `{value['command']}`: {value['summary']}, {value['seconds']} s ({value['matrix']})"
        for name, value in record.items()
        if name.startswith("sanitizer ")
    ] or [LACKING]
    lines += ["", "## Fuzzer", ""]
    fuzzer = record.get("fuzzer")
    if fuzzer:
        lines.append(f"{fuzzer['cases']} cases, {len(fuzzer['failures'])} failures: {fuzzer['kinds']}")
        lines += ["", *(f"- `{failure}`" for failure in fuzzer["failures"])]
    else:
        lines.append(LACKING)
    lines += ["", "## Errors against float64", "", ABOUT_ERRORS, ""]
    tables = {name[8:]: table for name, table in record.items() if name.startswith("errors: ")}
    for name, table in tables.items():
        lines += [name, "", "| | call | row | lse |", "|---|---|---|---|"]
        lines += [f"| {k} | {v['call']} | {v['row']} | {v['lse']} |" for k, v in table.items()] + [""]
    if not tables:
        lines.append(LACKING)
    return "\n".join(lines).rstrip() + "\n"


def main():
    if not RECORD.exists():
        raise SystemExit("no GPU run has been recorded yet (see CONTRIBUTING.md)")
    print(page(json.loads(RECORD.read_text())), end="")


if __name__ == "__main__":
    main()
