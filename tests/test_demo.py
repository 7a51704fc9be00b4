"""The demo: real data, its figures, and the command line."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from cupy_paged import __main__ as command_line
from cupy_paged import demo, fp8

# Error against the model's own output, (layer, pool): between half of and a little over what float64 attention on the
# same bf16 queries and pools gives, 2.66e-3 and 2.81e-2 in layer 0, 2.70e-3 and 0.97e-2 in layer 5. The bf16 figures
# are three roundings to bf16 of about 1.5e-3 each: queries, pool and output. Less than half would mean that the pools
# were not what they are called.
MODEL_ERROR = {(0, "bf16"): 2.7e-3, (0, "FP8"): 2.85e-2, (5, "bf16"): 2.75e-3, (5, "FP8"): 1.0e-2}


# The CUDA kernel also rounds probabilities to bf16 where the pool is bf16: up to a third of such a rounding, in quadrature.
CUDA_EXTRA = {"bf16": 0.05e-3, "FP8": 0.0}


def check(results, extra=None):
    assert [(r.layer, r.pool) for r in results] == list(MODEL_ERROR)
    for r in results:
        bound = MODEL_ERROR[r.layer, r.pool] + (extra[r.pool] if extra else 0)
        assert bound / 2 < r.model_error < bound
        assert 1e-4 < r.exact_error < 2.5e-3
        assert r.pool_bytes == 512 * (384 * 2 if r.pool == "bf16" else 384 + 4 * 6)
        assert r.milliseconds > 0


def test_numpy_figures():
    check(demo.run(on_cuda=False))


@pytest.mark.gpu
def test_cuda_figures():
    check(demo.run(on_cuda=True), CUDA_EXTRA)


def test_command_prints_what_it_did(capsys):
    assert command_line.main(["demo", "--backend", "numpy"]) == 0
    text = capsys.readouterr().out
    assert "Backend: NumPy on the CPU (as asked)" in text
    assert "47% saved" in text
    assert "within the bound of 0.0025" in text


def test_without_a_gpu_the_reason_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(demo, "missing_cuda", lambda: "CuPy is not installed")
    assert demo.main([]) == 0
    assert "Backend: NumPy on the CPU (CuPy is not installed)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        demo.main(["--backend", "cuda"])
    assert stop.value.code == 1
    assert "cannot run here: CuPy is not installed" in capsys.readouterr().err


def test_missing_cupy_is_recognised(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes the import fail
    assert demo.missing_cuda() == "CuPy is not installed"


@pytest.mark.parametrize("error", ["model_error", "exact_error"])
@pytest.mark.parametrize("place", range(4))
def test_a_bad_result_is_not_called_good(monkeypatch, capsys, error, place):
    """Each of the eight errors alone, a little beyond its bound or NaN, is named and ends the demo with status 1."""
    good = [demo.Result(layer, pool, 1, 0.0, 0.0, 1.0) for layer, pool in MODEL_ERROR]
    layer, pool = good[place].layer, good[place].pool
    bound = demo.MODEL_BOUND[layer, pool] if error == "model_error" else 2.5e-3
    for value in (1.001 * bound, math.nan):
        results = list(good)
        results[place] = dataclasses.replace(good[place], **{error: value})
        monkeypatch.setattr(demo, "run", lambda on_cuda, results=results: results)
        assert demo.main(["--backend", "numpy"]) == 1
        text = capsys.readouterr().out
        assert text.count("BEYOND") == 1
        assert f"layer {layer}, {pool}: " in text
        assert "within" not in text


def test_scales_that_are_too_large_are_noticed(monkeypatch):
    """Codes of few bits agree with float64 on their own rows; only the model tells that they are bad."""

    def coarse(kv, group_size):
        scales = fp8.quantize(kv, group_size, False)[1] * np.float32(40)
        codes = fp8.encode(kv.reshape(*scales.shape, group_size), scales[:, :, None])
        return codes.reshape(kv.shape).view(fp8.E4M3), scales

    monkeypatch.setattr(demo, "quantize_kv", coarse)
    assert demo.main(["--backend", "numpy"]) == 1


def test_usage(capsys):
    assert command_line.main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert command_line.main(["dance"]) == 2
    assert "unknown command 'dance'" in capsys.readouterr().err


def test_package_and_numpy_decode_import_no_array_library():
    """Neither CuPy nor torch nor JAX is imported by the package, nor by a decode on NumPy."""
    code = """if True:
        import sys
        import numpy as np
        import cupy_paged
        steps = np.arange(2, dtype=np.int32)
        q = np.ones((1, 1, 64), np.float16)
        assert (cupy_paged.paged_decode(q, q[0], steps[:1], steps) == 1).all()
        print(sorted({"cupy", "torch", "jax", "numba"} & set(sys.modules)))
    """
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"
