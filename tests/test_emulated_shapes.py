"""decode_mma on the emulated GPU over shapes and layouts: heads, D, groups, alignments, strides, splits, sm_80."""

from __future__ import annotations

import calls
import emulator
import fuzz
import ml_dtypes
import numpy as np
import pytest
import test_gpu_decode
import test_gpu_merge

from cupy_paged import paged_decode

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator is compiled with g++")

BF16, FP16 = ml_dtypes.bfloat16, np.float16


@pytest.fixture
def made_gpu(monkeypatch):
    """What makes an emulated GPU of some architecture, installed until the test ends."""
    from emulator import gpu as device

    def make(**properties):
        gpu = device.Gpu(**properties)
        device.install(monkeypatch, gpu)
        return gpu

    yield make
    device.forget()


def apart(gpu, a, pad, first=0):
    """`a` in every second row of a larger array, rows beginning `first` elements in and `pad` bytes further apart."""
    a = a.view(np.uint8) if a.dtype == ml_dtypes.float8_e4m3fn else a
    room = first + pad // a.itemsize
    whole = gpu.empty((2 * len(a), *a.shape[1:-1], a.shape[-1] + room), a.dtype)
    part = whole[::2, ..., first : first + a.shape[-1]]
    part[...] = a
    return part


@pytest.mark.parametrize(
    ("arch", "pad", "h", "d", "group", "more"),
    [
        pytest.param("80", 16, 7, 320, 64, {}, marks=pytest.mark.slow),
        pytest.param("80", 4, 128, 64, 32, {"num_splits": 2}, marks=pytest.mark.slow),
        ("80", 0, 19, 512, 64, {"batch_invariant": True}),
        ("90", 4, 1, 512, 128, {"num_splits": 1000}),
        pytest.param("90", 8, 33, 384, 128, {"num_splits": 1}, marks=pytest.mark.slow),
        pytest.param("120", 8, 127, 448, 32, {"num_splits": 2}, marks=pytest.mark.slow),
    ],
)
def test_layouts(made_gpu, arch, pad, h, d, group, more):
    """Rows of q, pool, scales and out apart, at any alignment, pages of one slot and of four: as float64, and the bits
    of contiguous arrays of that alignment."""
    gpu = made_gpu(arch=arch)
    rng = np.random.default_rng(d + h)
    for page_size in (1, 4):
        shape = {"t": 3, "h": h, "d": d, "group": group, "lengths": [33, 0, 90], "bad": 0.1, "pages": 50}
        call = calls.draw(rng, page_size=page_size, strided=True, **shape)
        arguments = {k: gpu.asarray(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
        arguments["unified_kv"] = apart(gpu, call["unified_kv"], pad, pad)
        arguments["kv_scales"] = apart(gpu, call["kv_scales"], pad, pad // 4)
        arguments["q"] = apart(gpu, call["q"], pad, pad // 2)
        out = apart(gpu, np.zeros_like(call["q"]), pad, pad // 2)
        got, lse = paged_decode(**arguments, out=out, return_lse=True, **more)
        assert got is out
        fuzz.compare("emulated", out.get(), lse.get(), fuzz.exact(call, more))
        again = apart(gpu, np.zeros_like(call["q"]), 16)
        paged_decode(**arguments | {"q": gpu.asarray(call["q"])}, out=again, **more)
        np.testing.assert_array_equal(again.get().view(np.uint16), out.get().view(np.uint16))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("d", range(64, 513, 64))
def test_every_width(made_gpu, arch, d):
    """All widths with all their groups, both 16-bit pools, odd numbers of heads."""
    gpu = made_gpu(arch=arch)
    rng = np.random.default_rng(d)
    kinds = [{"group": g} for g in (32, 64, 128) if d % g == 0] + [{"kv": "16"}, {"kv": "16", "q_dtype": FP16}]
    for kind in kinds:
        h, splits = 2 * int(rng.integers(0, 64)) + 1, int(rng.choice([1, 2, 1000]))
        call = calls.draw(rng, t=2, h=h, d=d, lengths=[int(rng.integers(0, 99)), 17], bad=0.1, **kind)
        arguments = {k: gpu.asarray(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
        for options in ({}, {"num_splits": splits}):
            out, lse = paged_decode(**arguments, return_lse=True, **options)
            fuzz.compare(f"{h} heads, {kind}, {options}", out.get(), lse.get(), fuzz.exact(call, options))


ON_GPU = [
    *((f, {"h": h}) for f in (test_gpu_decode.test_strides, test_gpu_decode.test_nan_stays_with_its_tokens) for h in (16, 128)),
    *((test_gpu_decode.test_nothing_leaks_from_unused_slots, {"h": h}) for h in (16, 64)),
    *((test_gpu_decode.test_random_call, {"seed": seed}) for seed in range(16)),
    (test_gpu_merge.test_agrees_with_numpy, {"dtype": BF16, "parts": 64, "sink": True}),
    (test_gpu_merge.test_halves_of_a_list_give_the_whole, {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("function", "arguments"), ON_GPU)
def test_as_on_a_gpu(made_gpu, function, arguments):
    made_gpu()
    function(**arguments)
