"""Seeded differential fuzzing of the public surface: NumPy against float64, and on a GPU CUDA against both.

    python tests/fuzz.py --minutes 5 --backend cuda     as many cases as fit
    python tests/fuzz.py --seed 1234 --backend cuda     one case, as a failure prints it

A seed decides everything. Decoding is compared with float64 within `allowed`; storing and building with plain loops,
and CUDA with NumPy bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
from faults import (  # noqa: E402
    BF16,
    BOUND,
    F32,
    FP8,
    FP16,
    INT_MAX,
    INT_MIN,
    LSE_BOUND,
    Backend,
    Guarded,
    kind,
    same_bits,
)

import cupy_paged  # noqa: E402

LENGTHS = [0, 0, 1, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 500, 700]
VALUES = [
    "normal",
    "normal",
    "normal",
    "outliers",
    "zeros",
    "tiny",
    "extremes",
    "spread",
    "constant",
    "largest",
    "subnormal",
]
INDICES = ["random", "random", "sorted", "repeated", "one slot", "all skipped", "some skipped", "descending"]


def sized(rng, choices, size):
    choices = [c for c in choices if c <= max(size * max(choices), min(choices))]
    return int(rng.choice(choices))


def floats(rng, shape, pattern):
    x = rng.standard_normal(shape)
    if pattern == "outliers":
        x[rng.random(shape) < 0.01] *= 1e4
    elif pattern == "zeros":
        x[rng.random(shape) < 0.9] = 0
    elif pattern == "tiny":
        x *= 10.0 ** rng.uniform(-42, -20)
    elif pattern == "extremes":
        x *= 10.0 ** rng.uniform(10, 37)
    elif pattern == "spread":
        x *= 10.0 ** rng.uniform(-6, 3, shape[:-1] + (1,) * bool(shape))
    elif pattern == "constant":
        x[...] = rng.uniform(-2, 2)
    elif pattern == "largest":  # of the dtype, once clipped to it
        x = np.copysign(np.inf, x if rng.random() < 0.5 else 1.0 + 0 * x)
    elif pattern == "subnormal":  # of bf16 or fp16
        x = rng.integers(-9, 10, shape) * float(rng.choice([2.0**-133, 2.0**-24]))
    return x


def clipped(x, dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype)


def decode_case(rng, size=1.0):
    """(call, options, properties of it) with NumPy arrays."""
    h = sized(rng, [1, 2, 3, 4, 5, 8, 12, 16, 17, 20, 24, 32, 33, 40, 48, 64, 65, 96, 100, 128], size)
    d = 64 * int(rng.integers(1, 9))
    t = sized(rng, [1, 1, 2, 3, 4, 7, 20], size)
    page_size = int(rng.choice([1, 1, 1, 2, 3, 16, 64]))
    pages = int(rng.integers(1, 600 // page_size + 2))
    q_dtype = [BF16, FP16][rng.integers(2)]
    fp8 = rng.random() < 0.7
    values, q_values, pattern = (str(rng.choice(c)) for c in (VALUES, VALUES, INDICES))
    shape = (pages, d) if page_size == 1 and rng.random() < 0.8 else (pages, page_size, d)
    call = {"q": clipped(floats(rng, (t, h, d), q_values), q_dtype)}
    if fp8:
        group = int(rng.choice([g for g in (32, 64, 128) if d % g == 0]))
        if rng.random() < 0.5:
            codes, scales = cupy_paged.quantize_kv(clipped(floats(rng, shape, values), F32), group_size=group)
        else:  # any codes under any scales
            codes = rng.integers(0, 254, shape).astype(np.uint8)
            codes = (codes + (codes >= 127)).view(FP8)
            if values == "zeros":
                codes[rng.random(shape) < 0.9] = 0
            if values in ("constant", "largest"):
                codes[...] = 448
            low, high = {
                "tiny": (-44, -30), "extremes": (20, 35.9), "spread": (-8, 4), "largest": (35.88, 35.88), "subnormal": (-44, -37.5)
            }.get(values, (-3, 0))  # fmt: skip
            if rng.random() < 0.1:  # all that float32 has
                low, high = -38, 35.88
            scales = (10.0 ** rng.uniform(low, high, (pages, d // group))).astype(F32)
            scales[rng.random(scales.shape) < 0.02] = 0
        call |= {"unified_kv": codes, "kv_scales": scales, "group_size": group}
    else:
        call["unified_kv"] = clipped(floats(rng, shape, values), q_dtype)
    lengths = np.array([sized(rng, LENGTHS, size) for _ in range(t)])
    nnz, slots = int(lengths.sum()), pages * page_size
    indices = rng.integers(0, slots, nnz + int(rng.integers(0, 6)))
    if pattern == "repeated":
        indices = rng.choice(indices[:3] if nnz else indices, len(indices)) if len(indices) else indices
    elif pattern == "one slot":
        indices[:] = indices[:1] if len(indices) else 0
    elif pattern in ("sorted", "descending"):
        indices.sort()
        indices = indices[::-1] if pattern == "descending" else indices
    skipped = {"all skipped": 1.0, "some skipped": 0.3}.get(pattern, 0.0)
    bad = rng.random(len(indices)) < skipped
    indices[bad] = rng.choice([-1, INT_MIN, slots, INT_MAX, slots + 12345], int(bad.sum()))
    call["kv_indices"] = indices.astype(np.int32)
    call["kv_indptr"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    options = {}
    if rng.random() < 0.4:
        sink = rng.standard_normal(h) * 4
        sink[rng.random(h) < 0.1] = rng.choice([-np.inf, np.inf, 1e30, -1e30])
        options["attn_sink"] = sink.astype(F32)
    if rng.random() < 0.3:
        options["softmax_scale"] = float(rng.choice([0.0, 1.0, -0.3, 1e-3, 0.2]))
    if rng.random() < 0.4:
        options["num_splits"] = int(rng.choice([1, 2, 3, 7, 32, 1000]))
    if rng.random() < 0.3:
        options["batch_invariant"] = True
    return call, options, {"values": values, "q_values": q_values, "pattern": pattern}


def exact(call, options):
    """(out, lse, allowed error of out, allowed error of lse per row) in float64, for rows that are finite.

    The allowed Frobenius error is the sum of
    - the contract's bound times the norm of the result: its own rounding, and that of the scales; where rounding the
      exact result errs by more, that (a few equal elements just above a power of two: up to 2**-8),
    - the rounding of each slot's probability (2**-11 in fp16, 2**-8 in bf16) where values cancel,
    - what a change of the scores by 2**-20 of their terms does (float32 sums of 512 terms), and by q's elements that
      are 2**-38 of the head's largest (q in fp16 after one power of two per head),
    - the spacing of the output's subnormal numbers, and float32's smallest normal number, under which scales and
      sums are flushed to zero: times 448 in a value, and times q in a score.
    """
    q, indptr = call["q"].astype(np.float64), call["kv_indptr"]
    rows = oracle.dequantized(call["unified_kv"], call.get("kv_scales"), call.get("group_size", 64))
    t, h, d = q.shape
    scale = options.get("softmax_scale", d**-0.5)
    sink = options.get("attn_sink")
    rounding = {"fp8": 2.0**-11, "16": 2.0**-8 if call["q"].dtype == BF16 else 2.0**-11}[kind(call)[1]]
    out, lse = np.zeros(q.shape), np.full((t, h), -np.inf)
    allowed, lse_allowed = 0.0, np.zeros((t, h))
    for i in range(t):
        listed = call["kv_indices"][indptr[i] : indptr[i + 1]].astype(np.int64)
        slots, counts = np.unique(listed[(listed >= 0) & (listed < len(rows))], return_counts=True)
        if not len(slots):
            continue
        kv = rows[slots]
        scores = scale * (q[i] @ kv.T)
        terms = abs(scale) * (np.abs(q[i]) @ np.abs(kv).T)
        flushed = abs(scale) * d * np.abs(q[i]).max(axis=1) * np.abs(kv).max() * 2.0**-38
        delta = terms.max(axis=1) * 2.0**-20 + flushed
        if kind(call)[1] == "fp8":
            delta += abs(scale) * np.abs(q[i]).sum(axis=1) * 448 * 2.0**-125
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top) * counts
        total = weights.sum(axis=1, keepdims=True)
        weights /= total
        lse[i] = (top + np.log(total))[:, 0]
        lse_allowed[i] = delta + LSE_BOUND[kind(call)] + 1e-6 * np.abs(lse[i])
        with np.errstate(over="ignore"):
            keep = 1.0 if sink is None else 1 / (1 + np.exp(sink.astype(np.float64)[:, None] - lse[i][:, None]))
        out[i] = weights @ kv * keep
        cancelled = np.sqrt((weights**2) @ (kv**2)) * rounding
        moved = 2 * np.minimum(delta + (sink is not None) * lse_allowed[i], 1)[:, None] * np.abs(kv).max(axis=0)
        allowed += float(((cancelled + moved) ** 2).sum())
    spacing = 2.0**-24 if call["q"].dtype == FP16 else 0.0
    floor = np.sqrt(out.size) * (spacing + 448 * 2.0**-125)
    most = float(ml_dtypes.finfo(call["q"].dtype).max)
    fits = np.clip(out, -most, most)
    own = float(np.linalg.norm(fits.astype(call["q"].dtype).astype(np.float64) - fits))
    bound = max(BOUND[kind(call)] * float(np.linalg.norm(out)), 1.01 * own)
    return out, lse, bound + np.sqrt(allowed) + floor, lse_allowed


def compare(name, out, lse, wanted):
    exact_out, exact_lse, allowed, lse_allowed = wanted
    most = float(ml_dtypes.finfo(out.dtype).max)
    got = out.astype(np.float64)
    assert np.isfinite(got).all(), f"{name}: {int((~np.isfinite(got)).sum())} elements of out are not finite"
    error = float(np.linalg.norm(got - np.clip(exact_out, -most, most)))
    assert error <= allowed, f"{name}: error {error:.3e} of norm {np.linalg.norm(exact_out):.3e}, allowed {allowed:.3e}"
    known = np.isneginf(exact_lse) | (lse_allowed < 1e3)  # others: scores near float32's largest number, or beyond
    assert (np.isneginf(lse) == np.isneginf(exact_lse))[known].all(), f"{name}: empty rows differ"
    some = ~np.isneginf(exact_lse) & (lse_allowed < 1e3)
    off = np.abs(lse[some].astype(np.float64) - exact_lse[some])
    assert (off <= lse_allowed[some]).all(), f"{name}: lse off by {off.max():.3e}"
    empty = out[np.isneginf(exact_lse)]
    assert not np.ascontiguousarray(empty).view(np.uint8).any(), f"{name}: an empty row is not zero"


def strided(rng, a, last=True):
    """The same values within a larger array; where `last`, also at an odd place of the last axis."""
    wide = np.full((a.shape[0] * 2, *a.shape[1:-1], a.shape[-1] + 48), np.nan if a.dtype.kind == "f" else 0, a.dtype)
    at = int(rng.choice([0, 16, 32])) if last else 0
    wide[::2, ..., at : at + a.shape[-1]] = a
    return wide, (slice(None, None, 2), ..., slice(at, at + a.shape[-1]))


def fuzz_decode(rng, backends, size):
    call, options, properties = decode_case(rng, size)
    wanted = exact(call, options)
    reach = rng.random() < 0.15
    wide = (
        {n: strided(rng, call[n]) for n in ("q", "unified_kv", "kv_scales") if n in call} if rng.random() < 0.3 else {}
    )
    poisoned = None
    listed = call["kv_indices"][: call["kv_indptr"][-1]]
    slots = call["unified_kv"].reshape(-1, call["q"].shape[-1])
    unused = np.setdiff1d(np.arange(len(slots)), listed)
    for b in backends:
        arguments = {k: b.put(v) for k, v in call.items()}
        for name, (whole, at) in wide.items():
            arguments[name] = b.put(whole)[at]
        out, lse = b.decode(arguments, **options)
        compare(b.name, out, lse, wanted)
        again, again_lse = b.decode(arguments, **options)
        same_bits(again, out)
        same_bits(again_lse, lse)
        if wide:
            plain, _ = b.decode(call, **options)
            compare(f"{b.name} contiguous", plain, lse, wanted)
        # Rubbish where nothing is listed, and between the arrays, changes no bit.
        bad = dict(call)
        bad["unified_kv"] = call["unified_kv"].copy()
        flat = bad["unified_kv"].reshape(slots.shape)
        flat[unused] = np.nan
        guarded = {n: Guarded(b, v, 0xFF) if isinstance(v, np.ndarray) else v for n, v in bad.items()}
        clean, clean_lse = b.decode(call, **options)
        dirty, dirty_lse = b.decode({n: getattr(v, "array", v) for n, v in guarded.items()}, **options)
        same_bits(dirty, clean)
        same_bits(dirty_lse, clean_lse)
        assert all(g.intact() for g in guarded.values() if isinstance(g, Guarded)), f"{b.name}: written outside out"
        if reach and len(listed):
            poisoned = reach_case(rng, b, call, options, clean) if poisoned is None else poisoned
    return f"decode {properties['values']}"


def reach_case(rng, b, call, options, clean):
    """NaN in one listed slot: every token that lists it shows it there, and no other changes a bit."""
    d = call["q"].shape[-1]
    pool = call["unified_kv"].copy()
    flat = pool.reshape(-1, d)
    inside = call["kv_indices"][: call["kv_indptr"][-1]]
    inside = inside[(inside >= 0) & (inside < len(flat))]
    if not len(inside):
        return False
    slot, dim = int(rng.choice(inside)), int(rng.integers(d))
    flat[slot, dim] = np.nan
    out, _ = b.decode(call | {"unified_kv": pool}, **options)
    for t in range(len(clean)):
        lists_it = slot in call["kv_indices"][call["kv_indptr"][t] : call["kv_indptr"][t + 1]]
        if lists_it:
            sink = options.get("attn_sink")
            heads = slice(None) if sink is None else ~np.isposinf(sink)
            assert np.isnan(out[t, heads, dim].astype(F32)).all(), f"{b.name}: NaN in a listed slot was lost"
        else:
            same_bits(out[t], clean[t])
    return True


def fuzz_hostile(rng, backends, size):
    """Any contents of kv_indptr and kv_indices: canaries stay, results are finite, the next call is right."""
    call, options, _ = decode_case(rng, size)
    slots = len(call["unified_kv"].reshape(-1, call["q"].shape[-1]))
    nnz = len(call["kv_indices"])
    wild = rng.choice([INT_MIN, -1, 0, 1, nnz // 2, nnz, nnz + 1, INT_MAX], len(call["kv_indptr"]))
    indices = rng.choice([INT_MIN, -1, 0, slots - 1, slots, INT_MAX], nnz)
    bad = call | {"kv_indptr": wild.astype(np.int32), "kv_indices": indices.astype(np.int32)}
    for b in backends:
        guarded = {n: Guarded(b, v, 0xFF) if isinstance(v, np.ndarray) else v for n, v in bad.items()}
        out = Guarded(b, np.zeros(call["q"].shape, call["q"].dtype))
        # What fixed splits of malformed rows give may come from the workspace: let it hold zeros.
        fixed = (
            {"workspace": b.full(1 << 28, 0, np.uint8)} if options.keys() & {"num_splits", "batch_invariant"} else {}
        )
        got, _ = b.decode({n: getattr(v, "array", v) for n, v in guarded.items()}, out=out.array, **options, **fixed)
        assert np.isfinite(got.astype(F32)).all(), f"{b.name}: not finite"
        assert out.intact(), f"{b.name}: written outside out"
        assert all(g.intact() for g in guarded.values() if isinstance(g, Guarded)), f"{b.name}: an input was written"
        compare(f"{b.name} afterwards", *b.decode(call, **options), exact(call, options))
    return "hostile lists"


def fuzz_store(rng, backends, size):
    """Rows into slots, growth and copies: NumPy against a loop where pages hold one slot, CUDA against NumPy."""
    d, page_size = 64 * int(rng.integers(1, 9)), int(rng.choice([1, 1, 4, 16]))
    pages = int(rng.integers(1, 40))
    group = int(rng.choice([g for g in (32, 64, 128) if d % g == 0]))
    scale_format = str(rng.choice(["float32", "pow2"]))
    dtype = str(rng.choice(["float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float16"]))
    pools = [
        cupy_paged.PagedKV(pages, page_size, d, dtype=dtype, group_size=group, scale_format=scale_format,
                           device="cuda" if b.cuda else "cpu")
        for b in backends
    ]  # fmt: skip
    model, untouched = np.zeros((pages * page_size, d)), np.arange(pages * page_size)
    for _ in range(int(rng.integers(1, 4))):
        n = sized(rng, [1, 2, 5, 17, 64], size)
        slots = rng.integers(-2, pages * page_size + 2, n).astype(np.int64)
        slots[rng.random(n) < 0.1] = rng.choice([INT_MIN, INT_MAX, 2**40 + 1, -(2**63)])
        rows = clipped(floats(rng, (n, d), str(rng.choice(VALUES))), [F32, BF16, FP16][rng.integers(3)])
        if rows.dtype != FP16:  # a code of more than 1.875 * 2**127 rounds up to 2**128, which float32 lacks
            rows = np.clip(rows.astype(F32), -(2.0**127), 2.0**127).astype(rows.dtype)
        for b, pool in zip(backends, pools, strict=True):
            pool.store(b.put(slots), b.put(rows))
        quantised = cupy_paged.dequantize_kv(
            *cupy_paged.quantize_kv(rows, group_size=group, scale_format=scale_format), group_size=group
        )
        for slot, row, q in zip(slots, rows, quantised, strict=True):
            if 0 <= slot < len(model):
                with np.errstate(over="ignore"):
                    kept = row.astype(BF16 if dtype == "bfloat16" else FP16)
                model[slot] = q if dtype.startswith("float8") else kept
        got = [b.get(p.dequantize()).astype(np.float64) for b, p in zip(backends, pools, strict=True)]
        if page_size == 1 or not dtype.startswith("float8"):
            same_bits(got[0] + 0.0, model + 0.0)
        untouched = np.setdiff1d(untouched, slots)
        for g in got[1:]:
            same_bits(g, got[0])
            assert not g[untouched].any()
        if not dtype.startswith("float8"):
            assert np.isfinite(got[0]).all() or dtype == "float16"
        else:
            assert np.isfinite(got[0]).all()
    src, dst = (rng.integers(-1, pages * page_size + 1, 7).astype(np.int32) for _ in range(2))
    for b, pool in zip(backends, pools, strict=True):
        pool.grow(pages + 3)
        pool.copy_slots(b.put(src), b.put(dst))
    for b, pool in list(zip(backends, pools, strict=True))[1:]:
        same_bits(b.get(pool.dequantize()), backends[0].get(pools[0].dequantize()))
    return f"store {dtype}"


def fuzz_lists(rng, backends, size):
    t, width, page_size = (int(rng.integers(0, n)) for n in (9, 12, 5))
    page_size += 1
    name = ["int32", "int64"][rng.integers(2)]
    padded = rng.integers(-3, 50, (t, width)).astype(name)
    lens = rng.integers(0, width * page_size + 1, t).astype(name)
    lists = [[int(r[i // page_size]) * page_size + i % page_size if r[i // page_size] >= 0 else -1 for i in range(n)]
             for r, n in zip(padded, lens, strict=True)]  # fmt: skip
    short = [[int(x) for x in r if x >= 0] for r in padded]
    for b in backends:
        for built, rows in (
            (cupy_paged.lists_from_page_table(b.put(padded), b.put(lens), page_size), lists),
            (cupy_paged.lists_from_padded(b.put(padded)), short),
        ):
            indices, indptr = (b.get(a) for a in built)
            assert indptr.tolist() == [0, *np.cumsum([len(r) for r in rows], dtype=int).tolist()], b.name
            assert indices[: indptr[-1]].tolist() == [x for r in rows for x in r], b.name
            assert (indices[indptr[-1] :] == -1).all(), b.name
    positions, sequences = rng.integers(-2, 300, t).astype(name), rng.integers(-1, 5, t).astype(name)
    arguments = {"positions": positions, "sequences": sequences, "ring_start": rng.integers(0, 1000, 4).astype(name)}
    options = {"window": int(rng.integers(1, 40)), "page_size": page_size, "base": int(rng.integers(0, 99))}
    if width and rng.random() < 0.7:
        arguments["page_table"] = rng.integers(-1, 30, (4, width)).astype(name)
        options["ratio"] = int(rng.choice([1, 4, 128]))
    results = [cupy_paged.lists_for_v4(**b.put(arguments), **options) for b in backends]
    for built in results[1:]:
        for a, first in zip(built, results[0], strict=True):
            same_bits(a, first)
    return "lists"


def fuzz_merge(rng, backends, size):
    n, t, h, d = (int(rng.integers(1, m)) for m in (6, 4, 20, 9))
    dtype = [BF16, FP16, F32][rng.integers(3)]
    outs = [rng.standard_normal((t, h, 64 * d)).astype(dtype) for _ in range(n)]
    lses = [(rng.standard_normal((t, h)) * rng.choice([1, 30])).astype(F32) for _ in range(n)]
    for out, lse in zip(outs, lses, strict=True):
        nothing = rng.random((t, h)) < 0.2
        lse[nothing], out[nothing] = -np.inf, np.nan
    sink = rng.standard_normal(h).astype(F32) if rng.random() < 0.5 else None
    weights = np.exp(np.stack(lses).astype(np.float64))
    total = weights.sum(axis=0)
    values = np.where(np.isneginf(np.stack(lses))[..., None], 0, np.stack(outs).astype(np.float64))
    extra = 0 if sink is None else np.exp(sink.astype(np.float64))
    wanted = (weights[..., None] * values).sum(axis=0) / np.where(total == 0, 1, total + extra)[..., None]
    bound = {BF16: 2.0**-8, FP16: 2.0**-11, F32: 1e-5}[dtype]
    for b in backends:
        out, lse = cupy_paged.merge_states([b.put(o) for o in outs], [b.put(e) for e in lses], b.put(sink))
        oracle.compare(b.get(out), wanted, bound)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(b.get(lse), np.log(total), rtol=1e-5, atol=1e-5)
    return f"merge {np.dtype(dtype).name}"


KINDS = [fuzz_decode] * 7 + [fuzz_hostile] + [fuzz_store, fuzz_lists, fuzz_merge]


def run(seed, backends, size=1.0):
    """One case; returns its kind, raises AssertionError where something is wrong."""
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return KINDS[rng.integers(len(KINDS))](rng, backends, size)


def reproduction(seed, backends):
    """The command for the smallest size of the case that still fails."""
    size = 1.0
    for smaller in (0.02, 0.1, 0.3, 0.6):
        try:
            run(seed, backends, smaller)
        except Exception:
            size = smaller
            break
    command = f"python tests/fuzz.py --seed {seed}" + (" --backend cuda" if backends[-1].cuda else "")
    return command + (f" --size {size}" if size < 1 else "")


def campaign(seconds, backends, first=0, most=None, keep_going=False):
    """Cases from seed `first` on until the time is over; (counts by kind, failures)."""
    end, counts, failures, seed = time.monotonic() + seconds, collections.Counter(), [], first
    while time.monotonic() < end and (most is None or seed < first + most):
        try:
            counts[run(seed, backends)] += 1
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            failures.append(f"{reproduction(seed, backends)}   # {text}")
            if not keep_going or len(failures) >= 20:
                break
        seed += 1
    return counts, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this case alone, or begin with it")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--size", type=float, default=1.0, help="shrink shapes and lengths of one case")
    parser.add_argument("--backend", choices=["numpy", "cuda"], default="numpy", help="cuda compares both")
    arguments = parser.parse_args()
    backends = [Backend("numpy")] + [Backend("cuda")] * (arguments.backend == "cuda")
    if arguments.minutes is None and arguments.seed is not None:
        try:
            print(run(arguments.seed, backends, arguments.size), "passed")
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    counts, failures = campaign(60 * (arguments.minutes or 1), backends, arguments.seed or 0, keep_going=True)
    print(f"{sum(counts.values())} cases passed: {dict(sorted(counts.items()))}")
    print("\n".join(failures) or "no failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
