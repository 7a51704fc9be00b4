"""A whole decode loop in one page, on real numbers: ``python -m cupy_paged.decode_loop``.

Two sequences are decoded side by side in the manner of DeepSeek-V4: every token attends to a window of its last
tokens, kept in a ring of slots, and to compressed entries of everything before, kept in pages of the same FP8 pool.
Rows are rotated by their positions on the way in, and the output is rotated back. The pool grows as pages run out.
After every step the output is compared with float64 attention.

The rows are hidden states of all-MiniLM-L6-v2 on 512 tokens of text, one sequence from each of two layers, and the
queries its own (see demo.py). A compressed entry is the mean of RATIO rows, where V4 has a learned compressor.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .demo import DATA, LAYERS, missing_cuda, relative_error
from .lists import lists_for_v4
from .pool import PagedKV
from .storage import apply_rope, inverse_rope

WINDOW = 64  # tokens a token sees of its own sequence
RATIO = 8  # tokens to a compressed entry
PAGE_ENTRIES = 4  # compressed entries of a page of the page table
ROPE_DIM = 64
PREFILL = (70, 150)  # tokens of each sequence that are there at once
STEPS = 160  # then one token each at a time


@dataclass(frozen=True)
class Step:
    """What one step gave: relative errors of the output against float64 attention.

    `exact_error` is on the pool's own rows and the queries as they were asked (rotated, in bf16); `true_error` is on
    rows that were never quantised, nor queries rounded after their rotation.
    """

    positions: tuple[int, ...]
    num_pages: int
    exact_error: float
    true_error: float


def rotation_tables(length: int) -> tuple[np.ndarray, np.ndarray]:
    frequency = 10000.0 ** -(np.arange(ROPE_DIM // 2) * 2 / ROPE_DIM)
    angle = np.arange(length)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate64(x: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: int = 1) -> np.ndarray:
    """The reference's rotation: float64, interleaved pairs; x is (T, ..., D)."""
    out = x.astype(np.float64)
    shape = (len(x),) + (1,) * (x.ndim - 2) + (ROPE_DIM // 2,)
    c, s = cos[positions].reshape(shape).astype(np.float64), sign * sin[positions].reshape(shape).astype(np.float64)
    begin = x.shape[-1] - ROPE_DIM
    a, b = out[..., begin::2].copy(), out[..., begin + 1 :: 2].copy()
    out[..., begin::2], out[..., begin + 1 :: 2] = a * c - b * s, b * c + a * s
    return out


def attend64(q: np.ndarray, kv: np.ndarray, scale: float) -> np.ndarray:
    scores = scale * (q @ kv.T)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ kv


class Loop:
    """The state of a serving loop: a pool, who owns which of its pages, and where each sequence is."""

    def __init__(self, on_cuda: bool) -> None:
        data = np.load(DATA)
        self.rows = [data[f"kv_{layer}"].astype(ml_dtypes.bfloat16) for layer in LAYERS]
        self.queries = [data[f"q_{layer}"].astype(ml_dtypes.bfloat16) for layer in LAYERS]
        self.scale = float(data["softmax_scale"])
        self.cos, self.sin = rotation_tables(512)
        self.array: Any = np.asarray
        if on_cuda:
            import cupy

            self.array = cupy.asarray
        self.tables = self.array(self.cos), self.array(self.sin)

        # Slots: first one ring of WINDOW for each sequence, then pages of PAGE_ENTRIES for compressed entries.
        self.rings = len(LAYERS) * WINDOW
        self.pool = PagedKV(
            self.rings + 8 * PAGE_ENTRIES, 1, self.rows[0].shape[1], device="cuda" if on_cuda else "cpu"
        )
        self.ring_start = np.arange(len(LAYERS), dtype=np.int32) * WINDOW
        self.page_table = np.full((len(LAYERS), 512 // RATIO // PAGE_ENTRIES), -1, np.int32)
        self.pages_used = 0

    def append(self, sequence: int, positions: np.ndarray) -> None:
        """Store consecutive tokens of a sequence, and the compressed entries that they complete."""
        rows = self.rows[sequence]
        recent = positions[-WINDOW:]
        self._store(self.ring_start[sequence] + recent % WINDOW, rows[recent], recent)
        entries = np.arange(positions[0] // RATIO, (positions[-1] + 1) // RATIO)
        if len(entries):
            slots = [self._slot_of(sequence, int(entry)) for entry in entries]
            self._store(np.array(slots), self.compressed(sequence, entries), entries * RATIO)

    def compressed(self, sequence: int, entries: np.ndarray) -> np.ndarray:
        rows = self.rows[sequence].astype(np.float32)
        return np.stack([rows[e * RATIO : (e + 1) * RATIO].mean(axis=0) for e in entries]).astype(ml_dtypes.bfloat16)

    def _slot_of(self, sequence: int, entry: int) -> int:
        """Of a compressed entry, taking a new page where it begins one."""
        column, offset = divmod(entry, PAGE_ENTRIES)
        if self.page_table[sequence, column] < 0:
            self.page_table[sequence, column] = self.pages_used
            self.pages_used += 1
            if self.rings + self.pages_used * PAGE_ENTRIES > self.pool.num_slots:
                self.pool.grow(self.pool.num_pages + 8 * PAGE_ENTRIES)
        return self.rings + int(self.page_table[sequence, column]) * PAGE_ENTRIES + offset

    def _store(self, slots: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> None:
        cos, sin = self.tables
        where, what, at = self.array(slots.astype(np.int32)), self.array(rows), self.array(positions.astype(np.int32))
        self.pool.store(where, what, positions=at, cos=cos, sin=sin)

    def decode(self, positions: np.ndarray) -> Step:
        """Attention of each sequence's newest token, and its errors."""
        given = self.array(positions.astype(np.int32))
        q = np.stack([queries[p % 16] for queries, p in zip(self.queries, positions, strict=True)])
        indices, indptr = lists_for_v4(
            given,
            None,
            self.array(self.ring_start),
            window=WINDOW,
            page_table=self.array(self.page_table),
            page_size=PAGE_ENTRIES,
            base=self.rings,
            ratio=RATIO,
        )
        turned = apply_rope(self.array(q.copy()), given, *self.tables)
        asked = _host(turned).astype(np.float64)
        out = self.pool.decode(turned, indices, indptr, softmax_scale=self.scale)
        out = _host(inverse_rope(out, given, *self.tables)).astype(np.float64)

        stored, lists, ends = _host(self.pool.dequantize()).astype(np.float64), _host(indices), _host(indptr)
        exact, true = np.empty(out.shape), np.empty(out.shape)
        for t, position in enumerate(positions):
            here = positions[t : t + 1]
            listed = stored[lists[ends[t] : ends[t + 1]]]
            exact[t] = rotate64(attend64(asked[t], listed, self.scale)[None], here, self.cos, self.sin, -1)[0]
            recent = np.arange(max(0, position + 1 - WINDOW), position + 1)
            entries = np.arange((position + 1) // RATIO)
            rows = np.concatenate([self.rows[t][recent], self.compressed(t, entries)])
            kv = rotate64(rows, np.concatenate([recent, entries * RATIO]), self.cos, self.sin)
            q64 = rotate64(q[t : t + 1], here, self.cos, self.sin)[0]
            true[t] = rotate64(attend64(q64, kv, self.scale)[None], here, self.cos, self.sin, -1)[0]
        return Step(
            tuple(int(p) for p in positions), self.pool.num_pages, relative_error(out, exact), relative_error(out, true)
        )


def _host(a: Any) -> np.ndarray:
    return a if isinstance(a, np.ndarray) else a.get()


def run(on_cuda: bool) -> list[Step]:
    loop = Loop(on_cuda)
    for sequence, length in enumerate(PREFILL):
        loop.append(sequence, np.arange(length))
    steps = [loop.decode(np.array(PREFILL) - 1)]
    for step in range(STEPS):
        positions = np.array(PREFILL) + step
        for sequence, position in enumerate(positions):
            loop.append(sequence, position[None])
        steps.append(loop.decode(positions))
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_paged.decode_loop", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("auto", "numpy", "cuda"), default="auto")
    backend = parser.parse_args(arguments).backend
    reason = None if backend == "numpy" else missing_cuda()
    if backend == "cuda" and reason:
        parser.error(f"no CUDA backend here: {reason}")
    on_cuda = backend != "numpy" and reason is None
    steps = run(on_cuda)
    print(f"{'positions':>12}  {'slots':>5}  error on the pool's rows  error on the true rows")
    for step in steps[::20]:
        print(f"{step.positions!s:>12}  {step.num_pages:5}  {step.exact_error:24.2e}  {step.true_error:22.2e}")
    grown = len({step.num_pages for step in steps}) - 1
    exact, true = ([getattr(step, name) for step in steps] for name in ("exact_error", "true_error"))
    print(f"{len(steps)} steps on {'CUDA' if on_cuda else 'NumPy'}, pool grown {grown} times")
    print(f"error on the pool's rows: median {np.median(exact):.2e}, worst {max(exact):.2e}")
    print(f"error on the true rows:   median {np.median(true):.2e}, worst {max(true):.2e} (what FP8 costs)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
