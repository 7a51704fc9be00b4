"""The GPU record: evidence of the last GPU run, tied to the sources it ran on by their digest."""

from __future__ import annotations

from pathlib import Path

from cupy_paged import jit

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"

# What decides the outcome of a GPU test beside the test itself: the kernels and the code that launches them.
LAUNCHING = (
    "arrays.py",
    "communicators.py",
    "distributed.py",
    "exchange.py",
    "jit.py",
    "lists.py",
    "ops.py",
    "plan.py",
    "pool.py",
    "storage.py",
    "backends/*.py",
)


def sources() -> list[Path]:
    package = ROOT / "cupy_paged"
    launching = [p for pattern in LAUNCHING for p in package.glob(pattern) if not p.name.startswith("numpy")]
    return sorted([*(ROOT / "kernels").iterdir(), *launching])


def digest() -> str:
    return jit.digest({p.relative_to(ROOT).as_posix(): p.read_bytes() for p in sources()})
