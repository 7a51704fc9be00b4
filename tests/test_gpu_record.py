"""The GPU record belongs to these sources, holds every GPU test, and shows no failure."""

from __future__ import annotations

import json
import subprocess
import sys

import gpu_record
import pytest


@pytest.fixture(scope="module")
def record():
    if not gpu_record.RECORD.exists():
        pytest.skip("no GPU run has been recorded yet (see CONTRIBUTING.md)")
    return json.loads(gpu_record.RECORD.read_text())


def test_record_is_of_these_sources(record):
    assert record["digest"] == gpu_record.digest(), (
        "kernels/ or the code that launches them changed after the GPU run: rerun the GPU tests on a GPU "
        "(see CONTRIBUTING.md) and commit the new tests/gpu_record.json"
    )


def test_record_has_every_gpu_test_and_no_failure(record):
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"],
        cwd=gpu_record.ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    wanted = {line for line in listing if "::" in line}
    assert wanted, "no GPU test was collected"
    assert set(record["tests"]) == wanted
    bad = {
        name: text for name, text in record["tests"].items() if text != "passed" and not text.startswith("skipped: ")
    }
    assert not bad


def test_record_names_the_machine(record):
    assert {"device", "driver", "cupy", "compute_capability"} <= set(record["gpu"])


def test_digest_notices_any_change(tmp_path, monkeypatch):
    before = gpu_record.digest()
    kernel = next(p for p in gpu_record.sources() if p.suffix == ".cu")
    changed = tmp_path / kernel.name
    changed.write_bytes(kernel.read_bytes() + b"\n")
    from cupy_paged import jit

    files = {p.relative_to(gpu_record.ROOT).as_posix(): p.read_bytes() for p in gpu_record.sources()}
    assert jit.digest(files) == before
    files[kernel.relative_to(gpu_record.ROOT).as_posix()] = changed.read_bytes()
    assert jit.digest(files) != before
