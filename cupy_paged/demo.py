"""The main job on real data: a model's own attention, from a bf16 pool and from an FP8 pool.

The data (data/minilm_attention.npz) are the self-attention of layers 0 and 5 of all-MiniLM-L6-v2 (Apache-2.0) on 512
tokens of text, in absorbed form: kv (512, 384) are a layer's hidden states, K and V of one shared head at once; q (16,
12, 384) the queries of 16 tokens with the key projection folded in; out (16, 12, 384) what the model computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from . import __version__, fp8
from .ops import paged_decode
from .storage import quantize_kv

DATA = Path(__file__).parent / "data" / "minilm_attention.npz"
LAYERS = (0, 5)
GROUP_SIZE = 64
EXACT_BOUND = 2.5e-3  # against float64 on the pool's own rows, as the package promises for bf16
# Against the model, by (layer, pool): float64 attention on the same bf16 queries and pools is off by these, of which
# FP8 is most; a decode within EXACT_BOUND adds at most that (triangle inequality, up to the norms' own difference).
MODEL_BOUND = {
    pair: exact + EXACT_BOUND
    for pair, exact in {
        (0, "bf16"): 2.21e-3,
        (0, "FP8"): 2.81e-2,
        (5, "bf16"): 2.14e-3,
        (5, "FP8"): 9.51e-3,
    }.items()
}
REPEATS = 20


@dataclass(frozen=True)
class Result:
    """One decode of a layer's 16 tokens over all 512.

    `model_error` is against the model's own output, `exact_error` against float64 attention on the pool's own rows:
    relative Frobenius norms. `pool_bytes` counts codes and scales.
    """

    layer: int
    pool: str
    pool_bytes: int
    model_error: float
    exact_error: float
    milliseconds: float

    def beyond(self) -> list[str]:
        """Errors out of their bounds, NaN among them, in words."""
        return [
            f"layer {self.layer}, {self.pool}: {error:.2e} {against}, BEYOND the bound of {bound:.2e}."
            for error, bound, against in (
                (self.model_error, MODEL_BOUND[self.layer, self.pool], "against the model"),
                (self.exact_error, EXACT_BOUND, "against float64"),
            )
            if not error <= bound
        ]


def missing_cuda() -> str | None:
    """Why the CUDA backend cannot run here; None where it can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            return "CuPy finds no GPU"
        from .backends import cuda

        cuda.device_properties(cuda.current_device())
        cupy.asarray(np.zeros(1, ml_dtypes.bfloat16))
    except Exception as error:  # no driver, an old driver, an old GPU, a CuPy without bf16
        return f"{type(error).__name__}: {error}"
    return None


def relative_error(got: Any, expected: Any) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def exact_attention(q: Any, rows: Any, softmax_scale: float) -> Any:
    """Float64 attention of q (T, H, D) over all rows (n, D)."""
    scores = softmax_scale * (q @ rows.T)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ rows


def median_ms(call: Callable[[], Any], finish: Callable[[], None]) -> float:
    """Wall clock of a warm call, from Python until the result is there."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        finish()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def run(on_cuda: bool) -> list[Result]:
    """Decode both layers from both pools."""
    if on_cuda:
        import cupy

        to_device, to_host, finish = cupy.asarray, cupy.asnumpy, cupy.cuda.get_current_stream().synchronize
    else:
        to_device = to_host = np.asarray

        def finish() -> None:
            pass

    results = []
    with np.load(DATA) as data:
        softmax_scale = float(data["softmax_scale"])
        for layer in LAYERS:
            kv, model_q, model_out = (data[f"{name}_{layer}"] for name in ("kv", "q", "out"))
            num_tokens, num_rows = len(model_q), len(kv)
            q = model_q.astype(ml_dtypes.bfloat16)
            # Tokens lie in the pool in any order, as they do once requests have come and gone: token i in slot[i].
            slot = np.random.default_rng(layer).permutation(num_rows).astype(np.int32)
            indices = to_device(np.tile(slot, num_tokens))
            indptr = to_device(np.arange(num_tokens + 1, dtype=np.int32) * num_rows)
            stored = np.empty_like(kv)
            stored[slot] = kv

            plain = stored.astype(ml_dtypes.bfloat16)
            codes, scales = quantize_kv(to_device(stored), group_size=GROUP_SIZE)
            values = fp8.decode(to_host(codes).view(np.uint8)).astype(np.float64)
            rows = values * np.repeat(to_host(scales).astype(np.float64), GROUP_SIZE, axis=1)
            for name, pool, pool_scales, exact_rows in (
                ("bf16", plain, None, plain.astype(np.float64)),
                ("FP8", codes, scales, rows),
            ):
                arguments = [to_device(q), to_device(pool), indices, indptr]
                options = {
                    "softmax_scale": softmax_scale,
                    "kv_scales": pool_scales,
                    "group_size": GROUP_SIZE,
                }

                def decode(arguments: list[Any] = arguments, options: dict[str, Any] = options) -> Any:
                    return paged_decode(*arguments, **options)

                out = to_host(decode()).astype(np.float64)
                exact = exact_attention(q.astype(np.float64), exact_rows, softmax_scale)
                results.append(
                    Result(
                        layer,
                        name,
                        pool.nbytes + (0 if pool_scales is None else pool_scales.nbytes),
                        relative_error(out, model_out),
                        relative_error(out, exact),
                        median_ms(decode, finish),
                    )
                )
    return results


def report(results: Sequence[Result]) -> str:
    lines = [
        f"{'layer':>5}  {'pool':<5}{'bytes':>8}  {'error against the model':>23}  {'against float64':>15}  {'time':>9}",
        *(
            f"{r.layer:>5}  {r.pool:<5}{r.pool_bytes:>8}  {r.model_error:>23.2e}  {r.exact_error:>15.2e}"
            f"  {r.milliseconds:>6.2f} ms"
            for r in results
        ),
    ]
    wide, narrow = (sum(r.pool_bytes for r in results if r.pool == name) for name in ("bf16", "FP8"))
    lines.append("")
    lines.append(
        f"The FP8 pools with their scales take {narrow} bytes instead of {wide}: {1 - narrow / wide:.0%} saved."
    )
    bad = [line for r in results for line in r.beyond()]
    worst = max(r.exact_error for r in results)
    good = f"Against float64 on the dequantised pool: at most {worst:.2e}, within the bound of {EXACT_BOUND}."
    return "\n".join(lines + (bad or [good]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_paged demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--backend", choices=["auto", "cuda", "numpy"], default="auto", help="default: CUDA if it works"
    )
    backend = parser.parse_args(arguments).backend
    missing = None if backend == "numpy" else missing_cuda()
    if backend == "cuda" and missing:
        parser.exit(1, f"The CUDA backend cannot run here: {missing}\n")
    on_cuda = backend != "numpy" and missing is None
    print(f"cupy_paged {__version__}: attention of all-MiniLM-L6-v2, 16 tokens x 12 heads over 512 tokens, D = 384")
    if on_cuda:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
        print(f"Backend: CUDA on {name}")
    else:
        print(f"Backend: NumPy on the CPU ({'as asked' if backend == 'numpy' else missing})")
    print("Queries and outputs in bf16, tokens in shuffled slots; errors are relative Frobenius norms.\n")
    results = run(on_cuda)
    print(report(results))
    return 1 if any(r.beyond() for r in results) else 0
