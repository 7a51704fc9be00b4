"""GPU tests: skipped with a reason where there is no GPU, and written to the GPU record with --gpu-record."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import gpu_record

# Tests write no bytecode or caches into the checkout's package, and one process is enough for BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX shares the GPU with CuPy and torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _missing_gpu() -> str | None:
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA GPU"
    except ImportError:
        return "CuPy is not installed"
    except Exception as error:  # no driver
        return f"no CUDA GPU ({type(error).__name__})"


def _record(file):
    """The record in `file` if it is of these sources, else an empty one."""
    path = Path(file or gpu_record.RECORD)
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("digest") == gpu_record.digest() else {}


def pytest_addoption(parser):
    parser.addoption("--gpu-record", metavar="FILE", help="write the outcome of every GPU test to FILE")
    parser.addoption(
        "--gpu-missing", action="store_true", help="run only what the record of these sources does not show as passed"
    )


def pytest_configure(config):
    config.gpu_outcomes = {}
    config.gpu_extra = {}


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_gpu() if marked else None
    if config.getoption("--gpu-missing"):
        done = {
            name
            for name, text in _record(config.getoption("--gpu-record")).get("tests", {}).items()
            if text != "failed"
        }
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]
    for item in marked:
        item.user_properties.append(("gpu", True))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


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
        request.node.user_properties.append((f"record {name}", json.dumps(value)))

    return put


class GpuOutcomes:
    """Collects the outcomes of GPU tests, from this process or from the workers of pytest-xdist."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if "gpu" not in properties:
            return
        for name, value in properties.items():
            if name.startswith("record "):
                self.config.gpu_extra[name[7:]] = json.loads(value)
        if report.when == "call" or report.outcome != "passed":
            text = report.outcome
            if report.skipped:
                text = f"skipped: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
            if report.when == "call" or text != "passed":
                self.config.gpu_outcomes[report.nodeid] = text


def _stop(signum, frame):
    raise KeyboardInterrupt("terminated")


def pytest_sessionstart(session):
    signal.signal(signal.SIGTERM, _stop)  # a run that is cut short still writes what it saw
    if session.config.getoption("--gpu-record") and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(GpuOutcomes(session.config), "gpu_outcomes")


def pytest_sessionfinish(session):
    config = session.config
    target = config.getoption("--gpu-record")
    if not target or not config.gpu_outcomes or hasattr(config, "workerinput") or _missing_gpu():
        return
    from cupy_paged import bench

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    # Two runs on the same sources add up (the tests in parallel, then the benchmark alone); others start afresh.
    before = _record(target)
    record = {
        **before,
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": {**bench.gpu_description(), "driver": driver},
        "digest": gpu_record.digest(),
        "tests": dict(sorted({**before.get("tests", {}), **config.gpu_outcomes}.items())),
        **config.gpu_extra,
    }
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
