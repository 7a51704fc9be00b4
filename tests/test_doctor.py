"""The doctor's report: useful with nothing installed, and on a GPU machine."""

from __future__ import annotations

import subprocess
import sys

import gpu_record
import pytest

from cupy_paged import doctor


def test_without_cupy():
    """With CuPy missing it names the extras, mentions no later check, and says 1."""
    code = "import sys; sys.modules['cupy'] = None; from cupy_paged import doctor; sys.exit(doctor.main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=gpu_record.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "cupy-paged[cuda12]" in done.stdout
    assert "[ok] NumPy backend" in done.stdout
    assert "NVRTC" not in done.stdout


def test_unwritable_cache_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    assert doctor._cache().works
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    found = doctor._cache()
    assert not found.works
    assert "CUPY_CACHE_DIR" in found.remedy


def test_a_check_that_raises_is_a_finding(monkeypatch):
    def broken():
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(doctor, "CHECKS", (("CuPy", broken, "do this"),))
    assert doctor.examine()[1] == doctor.Finding("CuPy", False, "first line", "do this")


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert doctor.main([]) == 0
    assert "decode_" in capsys.readouterr().out
