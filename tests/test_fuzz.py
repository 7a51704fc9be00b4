"""The fuzzer of fuzz.py: a fixed run in CI on NumPy, a timed one on the GPU, and proof that it can fail."""

from __future__ import annotations

import faults
import fuzz
import numpy as np
import pytest

SECONDS = 30  # on the GPU


@pytest.mark.slow
def test_numpy_against_float64():
    counts, failures = fuzz.campaign(120, [faults.Backend("numpy")], most=1500)
    assert not failures, "\n".join(failures)
    assert sum(counts.values()) >= 300


def test_cuda_against_numpy_and_float64(cuda, record_gpu):
    counts, failures = fuzz.campaign(SECONDS, [faults.Backend("numpy"), cuda], first=10_000, keep_going=True)
    record_gpu(
        "fuzzer", {"cases": sum(counts.values()), "kinds": dict(sorted(counts.items())), "failures": failures[:20]}
    )
    assert not failures, "\n".join(failures[:20])


@pytest.mark.parametrize("fault", ["factor", "nan", "lse", "padding", "other slot"])
def test_the_fuzzer_finds_faults(monkeypatch, fault):
    inner = fuzz.Backend.decode

    def faulty(self, call, **options):
        out, lse = inner(self, call, **options)
        if fault == "factor":
            out = (out.astype(np.float32) * 1.02).astype(out.dtype)
        elif fault == "nan" and out.size:
            out[0, 0, 0] = np.nan
        elif fault == "lse":
            lse = lse * np.float32(np.log2(np.e))
        elif fault == "padding":
            call = {k: v for k, v in call.items() if k != "out"}
            extra = np.concatenate([call["kv_indices"], np.zeros(1, np.int32)])
            call |= {"kv_indices": extra, "kv_indptr": np.r_[call["kv_indptr"][:-1], call["kv_indptr"][-1:] + 1]}
            out, lse = inner(self, call, **options)
        elif fault == "other slot" and len(call["kv_indices"]):
            call = call | {"kv_indices": np.maximum(call["kv_indices"], 0)}
            out, lse = inner(self, call, **options)
        return out, lse

    monkeypatch.setattr(fuzz.Backend, "decode", faulty)
    monkeypatch.setattr(fuzz, "reproduction", lambda seed, backends: f"--seed {seed}")
    _, failures = fuzz.campaign(60, [faults.Backend("numpy")], most=60)
    assert failures


def test_a_failure_prints_the_command_that_repeats_it(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "KINDS", [broken])
    _, failures = fuzz.campaign(10, [faults.Backend("numpy")], most=3)
    assert failures[0].startswith("python tests/fuzz.py --seed 0 --size 0.3   # AssertionError")
    monkeypatch.setattr(fuzz.sys, "argv", ["fuzz.py", "--seed", "0", "--size", "0.3"])
    assert fuzz.main() == 1
    assert "too large" in capsys.readouterr().err


def broken(rng, backends, size):
    assert size < 0.2, "too large"
    return "broken"
