"""GPU tests: skipped with a reason where there is no GPU, and written to the GPU record with --gpu-record."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import gpu_record

# Tests write no bytecode or caches into the checkout's package, and one process is enough for BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _missing_gpu() -> str | None:
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA GPU"
    except ImportError:
        return "CuPy is not installed"
    except Exception as error:  # no driver
        return f"no CUDA GPU ({type(error).__name__})"


def pytest_addoption(parser):
    parser.addoption("--gpu-record", metavar="FILE", help="write the outcome of every GPU test to FILE")


def pytest_configure(config):
    config.gpu_outcomes = {}
    config.gpu_extra = {}


def pytest_collection_modifyitems(config, items):
    reason = _missing_gpu() if any(item.get_closest_marker("gpu") for item in items) else None
    for item in items:
        if item.get_closest_marker("gpu"):
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
            else:
                config.gpu_outcomes[item.nodeid] = "not run"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    outcomes = item.config.gpu_outcomes
    if item.nodeid not in outcomes:
        return
    if report.when == "call" or report.outcome != "passed":
        text = report.outcome
        if report.skipped:
            text = f"skipped: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
        outcomes[item.nodeid] = text


@pytest.fixture(params=["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Both backends in turn, the CUDA one marked as a GPU test."""
    from faults import Backend

    return Backend(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request):
    from faults import Backend

    return Backend(request.param)


@pytest.fixture
def record_gpu(request):
    """Put a value into the GPU record: ``record_gpu('benchmark', {...})``."""

    def put(name, value):
        request.config.gpu_extra[name] = value

    return put


def pytest_sessionfinish(session):
    config = session.config
    target = config.getoption("--gpu-record")
    if not target or not config.gpu_outcomes:
        return
    from cupy_paged import bench

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    record = {
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": {**bench.gpu_description(), "driver": driver},
        "digest": gpu_record.digest(),
        "tests": dict(sorted(config.gpu_outcomes.items())),
        **config.gpu_extra,
    }
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
