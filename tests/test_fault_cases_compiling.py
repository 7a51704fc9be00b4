"""Public fault reports about compiling, as tests: O16, O25 to O27.

Named as in test_fault_cases_lists.py; shared parts are in faults.py. What fails while compiling is provoked in fresh
processes, so that nothing loaded before hides it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import faults
import numpy as np
import pytest

from cupy_paged import jit, workspace_size

ROOT = Path(__file__).resolve().parent.parent


def child(code, *, cache=None, timeout=120, **environment):
    """Start a fresh Python at the root of the checkout with this code."""
    environment = {k: str(v) for k, v in environment.items()}
    if cache is not None:
        environment["CUPY_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.path[:0] = ['.', 'tests']\n" + code],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=120):
    """The standard output of a child that must succeed."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err[-3000:]}"
    return out


# O16: a capture that finds nothing compiled

COLD_CAPTURE = """
import cupy, faults
import cupy_paged
gpu = faults.Backend("cuda").put(faults.base())
out, workspace = cupy.empty_like(gpu["q"]), cupy.empty(1 << 26, "uint8")
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture()
    try:
        cupy_paged.paged_decode(**gpu, out=out, workspace=workspace)
    except RuntimeError as error:
        assert "warmup(" in str(error), error
        print("refused")
    stream.end_capture()
    cupy_paged.warmup(4, 16, 512, 256)
    stream.begin_capture()
    cupy_paged.paged_decode(**gpu, out=out, workspace=workspace)
    graph = stream.end_capture()
    graph.launch()
    faults.near_reference(faults.base(), *(a.get() for a in (out, cupy_paged.paged_decode(**gpu, return_lse=True)[1])))
print("done")
"""


def test_o16_first_call_inside_a_capture(cuda, tmp_path):
    assert finish(child(COLD_CAPTURE, cache=tmp_path / "cache")).split() == ["refused", "done"]


# O25 to O27: compiling

RACE = """
import os, time
import cupy, faults
from cupy_paged import jit, paged_decode
folder = os.environ["RACE"]
gpu = faults.Backend("cuda").put(faults.base())
me = os.environ["ME"]
def meet(name):
    open(f"{folder}/{name}.{me}", "w").close()
    while sum(f.startswith(f"{name}.") for f in os.listdir(folder)) < 8:
        time.sleep(0.001)
meet("ready")
print(hash(paged_decode(**gpu).tobytes()), hash(cupy.arange(3).tobytes()))
from cupy.cuda import compiler
for n in range(19):
    cache = f"{folder}/cache{n}"
    compiler._set_kernel_cache_backend(compiler._DiskKernelCacheBackend(cache))
    cupy.clear_memo(); jit._module.cache_clear(); jit.load.cache_clear()
    meet(f"round{n}")
    constants = (("ALIGNED", 1), ("GATHER", 1), ("INDEX_BYTES", 4))
    assert jit.load("move.cu", "move_items", constants, "90", 0)
"""


def test_o25_processes_compile_into_one_empty_cache(cuda, tmp_path):
    """Eight at once, twenty rounds: a decoding kernel first, then a small one into a new folder each time."""
    from cupy.cuda import compiler

    if not hasattr(compiler, "_set_kernel_cache_backend"):
        pytest.skip("this CuPy cannot change its cache folder within a process")
    everyone = [child(RACE, cache=tmp_path / "cache", RACE=tmp_path, ME=i, PYTHONHASHSEED=0) for i in range(8)]
    outputs = [finish(p) for p in everyone]
    assert len(set(outputs)) == 1
    left = [p.name for p in tmp_path.glob("cache*/*") if p.suffix != ".cubin"]
    assert not left, "unfinished files in the cache"


DECODE = """
import faults
from cupy_paged import paged_decode
call = faults.base()
out, lse = faults.Backend("cuda").decode(call)
faults.near_reference(call, out, lse)
print("right")
"""


def test_o25_damaged_and_unusable_caches(cuda, tmp_path):
    """Truncated and foreign files are compiled anew; a folder that cannot be written is done without."""
    cache = tmp_path / "cache"
    assert finish(child(DECODE, cache=cache)).strip() == "right"
    files = sorted(cache.glob("*.cubin"))
    assert files
    whole = [f.read_bytes() for f in files]
    for damage in (lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-7] + b"garbage", lambda b: b[:20]):
        for file, content in zip(files, whole, strict=True):
            file.write_bytes(damage(content))
        assert finish(child(DECODE, cache=cache)).strip() == "right"
        assert [f.read_bytes() for f in files] == whole
    for file in files:  # not even readable as a file
        file.unlink()
        file.mkdir()
    assert finish(child(DECODE, cache=cache)).strip() == "right"


NO_WRITING = """
import tempfile, errno
from cupy.cuda import _compiler_cache
def full(*args, **kwargs):
    raise OSError(errno.{code}, "as if")
_compiler_cache.tempfile = type("t", (), {{"NamedTemporaryFile": staticmethod(full)}})
"""


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "EACCES", "EDQUOT"])
def test_o25_a_full_or_read_only_cache(cuda, tmp_path, code):
    pytest.importorskip("cupy.cuda._compiler_cache")
    process = child(NO_WRITING.format(code=code) + DECODE, cache=tmp_path / "cache")
    assert finish(process).strip() == "right"


INTERRUPT = """
import os, signal, threading
import cupy, faults
gpu = faults.Backend("cuda").put(faults.base())
cupy.arange(3).sum().get()
from cupy_paged import jit, paged_decode
from cupy.cuda import compiler
inner = compiler._compile_using_nvrtc_no_warning
def interrupted(*args, **kwargs):
    result = inner(*args, **kwargs)
    compiler._compile_using_nvrtc_no_warning = inner
    raise KeyboardInterrupt
compiler._compile_using_nvrtc_no_warning = interrupted
try:
    paged_decode(**gpu)
except KeyboardInterrupt:
    print("interrupted")
out, lse = paged_decode(**gpu, return_lse=True)
faults.near_reference(faults.base(), out.get(), lse.get())
print("right")
"""


def test_o25_interrupted_compilation_leaves_a_usable_process_and_cache(cuda, tmp_path):
    from cupy.cuda import compiler

    if not hasattr(compiler, "_compile_using_nvrtc_no_warning"):
        pytest.skip("this CuPy compiles elsewhere")
    cache = tmp_path / "cache"
    assert finish(child(INTERRUPT, cache=cache)).split() == ["interrupted", "right"]
    assert finish(child(DECODE, cache=cache)).strip() == "right"


def test_o26_missing_headers_name_the_package(monkeypatch):
    pytest.importorskip("cupy", reason="compiling needs CuPy")
    from cupy_paged.backends import variants
    from cupy_paged.plan import Problem

    variant, _ = variants.choose(
        Problem(1, 16, 512, 64, 1, "bfloat16", "float8_e4m3fn", 64, 0, False), 90, 132, (16, 16)
    )
    monkeypatch.setattr(jit, "_include_flags", list)
    with pytest.raises(ImportError, match=r"cuda_\w+\.h.*cuda-toolkit\[nvrtc,cudart\].*CUDA_PATH"):
        jit.compile_cubin(
            "decode_mma.cu",
            variants.mma_variant(
                Problem(1, 16, 512, 64, 1, "bfloat16", "float8_e4m3fn", 64, 0, False), 80, 108, (16, 16)
            ).constants,
            "80",
        )
    assert variant.file
    monkeypatch.undo()
    error = jit.compile_error("a.cu", "80", 'a.cu(1): catastrophic error: could not open source file "cuda_fp8.h" (no')
    assert isinstance(error, ImportError)
    error = jit.compile_error("a.cu", "80", 'a.cu(1): catastrophic error: cannot open source file "cuda_fp8.h"')
    assert isinstance(error, ImportError)
    assert isinstance(jit.compile_error("a.cu", "80", "error: identifier"), RuntimeError)


@pytest.mark.parametrize("error", [RuntimeError, ImportError, OSError, AttributeError])
def test_o26_missing_nvrtc_names_the_package(monkeypatch, error):
    cupy = pytest.importorskip("cupy", reason="compiling needs CuPy")

    class Missing:
        @staticmethod
        def getVersion():
            raise error("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda, "nvrtc", Missing)
    with pytest.raises(ImportError, match=r"(?s)libnvrtc.*cuda-toolkit\[nvrtc"):
        jit.compile_cubin("move.cu", (("ALIGNED", 1), ("GATHER", 1), ("INDEX_BYTES", 4)), "80")


def test_o26_no_cupy_names_the_extra(monkeypatch):
    from cupy_paged.backends import cuda

    cuda._cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"cupy-paged\[cuda12\].*cupy-paged\[cuda13\]"):
        workspace_size(1, 16, 512, 64)
    monkeypatch.undo()
    cuda._cupy.cache_clear()


def test_o26_missing_headers_on_the_device(cuda, tmp_path):
    """Without the headers CuPy's own compilation fails; the error names the package and the next call works."""
    code = """
import cupy, faults
from cupy_paged import jit, paged_decode
gpu = faults.Backend("cuda").put(faults.base())
inner = jit.source
jit.source = lambda file: inner(file).replace("<cuda_", "<absent_cuda_")
try:
    paged_decode(**gpu)
except ImportError as error:
    assert "cuda-toolkit[nvrtc,cudart]" in str(error), error
    print("named")
jit.source = inner
out, lse = paged_decode(**gpu, return_lse=True)
faults.near_reference(faults.base(), out.get(), lse.get())
print("right")
"""
    assert finish(child(code, cache=tmp_path / "cache")).split() == ["named", "right"]


@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
@pytest.mark.parametrize("config", [faults.CONFIGS[i] for i in (0, 3, 6)], ids=str)
def test_o27_decoding_compiles_for_every_architecture(arch, config):
    pytest.importorskip("cupy", reason="compiling needs CuPy")
    from cupy_paged.backends import variants
    from cupy_paged.plan import Problem

    problem = Problem(
        4, config.num_heads, config.head_dim, 256, config.page_size, np.dtype(config.q_dtype).name,
        "float8_e4m3fn" if config.kv == "fp8" else np.dtype(config.q_dtype).name, config.group_size, 0, False,
    )  # fmt: skip
    variant, _ = variants.choose(problem, int(arch), 100, (16, 16))
    assert variant.shared_bytes <= 1024 * variants.SHARED_KB[int(arch)] - 1024
    for file, constants in ((variant.file, variant.constants), (variant.combine.file, variant.combine.constants)):
        cubin, log = jit.compile_cubin(file, constants, variant.arch or arch)
        assert cubin[:4] == b"\x7fELF"
        assert " 0 bytes spill stores" in log, log


def test_o27_an_unsupported_architecture_is_named(monkeypatch):
    cupy = pytest.importorskip("cupy")
    from cupy_paged.backends import cuda

    old = {"major": 7, "minor": 5, "name": b"Tesla T4", "multiProcessorCount": 40}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda device: old, raising=False)
    cuda.device_properties.cache_clear()
    with pytest.raises(RuntimeError, match=r"T4.*7\.5.*8\.0 or newer.*NumPy"):
        cuda.device_properties(0)
    cuda.device_properties.cache_clear()
