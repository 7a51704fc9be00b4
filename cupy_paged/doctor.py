"""``python -m cupy_paged doctor``: what works on this machine, and what would bring what does not.

Exit status: 0 where the CUDA kernels run, 1 where only the NumPy backend does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

INSTALL = "pip install 'cupy-paged[cuda12]' or 'cupy-paged[cuda13]', by the driver's CUDA major"


class Finding(NamedTuple):
    """One line of the report. `remedy`: what to do where `works` is false."""

    name: str
    works: bool
    text: str
    remedy: str = ""


def _numpy() -> Finding:
    import numpy as np

    from . import __version__

    return Finding("NumPy backend", True, f"works (NumPy {np.__version__}, cupy_paged {__version__})")


def _cupy() -> Finding:
    import cupy

    return Finding("CuPy", True, cupy.__version__)


def _driver() -> Finding:
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    if version == 0:
        return Finding("driver", False, "no CUDA driver", "install the NVIDIA driver, on a machine with an NVIDIA GPU")
    return Finding("driver", True, f"supports CUDA {version // 1000}.{version % 1000 // 10}")


def _gpu() -> Finding:
    from cupy.cuda import runtime

    from .backends import cuda

    count = runtime.getDeviceCount()
    names = []
    for device in range(count):
        arch, num_sms = cuda.device_properties(device)
        name = runtime.getDeviceProperties(device)["name"].decode()
        names.append(f"{name} (compute capability {arch[:-1]}.{arch[-1]}, {num_sms} multiprocessors)")
    return Finding("GPU", bool(count), "; ".join(names) or "none found", "a GPU of compute capability 8.0 or newer")


def _nvrtc() -> Finding:
    import cupy

    from . import jit

    version = jit._cuda_version()
    built = cupy.cuda.runtime.runtimeGetVersion() // 1000
    same = version[0] == built
    return Finding(
        "NVRTC",
        same,
        f"{version[0]}.{version[1]}, CuPy is built for CUDA {built}",
        f"install the compiler of CuPy's CUDA major: pip install 'cuda-toolkit[nvrtc,cudart]=={built}.*'",
    )


def _headers() -> Finding:
    from . import jit

    jit.compile_cubin("merge.cu", (("DTYPE", 1), ("MAX_PARTS", 64)), "80")
    return Finding("CUDA headers", True, "a kernel that includes them compiles")


def _cache() -> Finding:
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(parent, os.W_OK)
    return Finding(
        "kernel cache",
        writable,
        f"{folder} ({'writable' if writable else 'not writable: every process compiles its kernels anew'})",
        "set CUPY_CACHE_DIR to a writable folder",
    )


def _kernel() -> Finding:
    from .backends import cuda
    from .plan import Problem

    chosen = []
    for heads in (16, 128):
        problem = Problem(128, heads, 512, 128 * 2176, 1, "bfloat16", "float8_e4m3fn", 64, 0, False)
        variant, plan = cuda.plan_for(problem, cuda.current_device())
        chosen.append(f"H = {heads}: {variant.entry}, {plan.num_ctas} workers")
    return Finding("kernels for (T, L) = (128, 2176), D = 512, FP8", True, "; ".join(chosen))


# What a check needs comes before it; the first that fails on the way to a GPU makes the later ones pointless.
CHECKS: tuple[tuple[str, Callable[[], Finding], str], ...] = (
    ("CuPy", _cupy, INSTALL),
    ("driver", _driver, "install the NVIDIA driver"),
    ("GPU", _gpu, "a GPU of compute capability 8.0 or newer"),
    ("NVRTC", _nvrtc, INSTALL),
    ("CUDA headers", _headers, INSTALL),
    ("kernel cache", _cache, ""),
    ("kernels", _kernel, ""),
)


def examine() -> list[Finding]:
    """All findings; a check that raises is a finding too."""
    findings = [_numpy()]
    for name, check, remedy in CHECKS:
        if name != "CuPy" and not findings[1].works:
            break
        try:
            findings.append(check())
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            findings.append(Finding(name, False, text.splitlines()[0], remedy))
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m cupy_paged doctor", description=(__doc__ or "").split("\n\n")[0]
    ).parse_args(arguments)
    findings = examine()
    for finding in findings:
        print(f"[{'ok' if finding.works else '--'}] {finding.name}: {finding.text}")
        if not finding.works and finding.remedy:
            print(f"     to mend it: {finding.remedy}")
    works = all(f.works for f in findings if f.name != "kernel cache")
    print(
        "CUDA kernels run on this machine." if works else "NumPy arrays work; CUDA kernels do not run on this machine."
    )
    return 0 if works else 1
