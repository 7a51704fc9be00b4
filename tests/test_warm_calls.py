"""Warm calls on a GPU: what they find again, for which changes they decide anew, and what they launch with.

No GPU is needed: CuPy arrays here are addresses that nothing reads, and launches are recorded, not made.
"""

from __future__ import annotations

import ctypes
import struct
import types
import typing

import ml_dtypes
import numpy as np
import pytest

from cupy_paged import arrays, checks, ops, paged_decode
from cupy_paged.backends import cuda

cupy = pytest.importorskip("cupy")

BF16, F32, U8, I32 = ml_dtypes.bfloat16, np.float32, np.uint8, np.int32
PARAMS = struct.Struct("=10Q7qfI10i")
T, H, D, PAGES, NNZ = 2, 16, 512, 8, 40


def at(address, shape, dtype, strides=None, device=0):
    memory = cupy.cuda.UnownedMemory(address, 1 << 30, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def call(**changes):
    given = {
        "q": at(0x100000, (T, H, D), BF16),
        "unified_kv": at(0x200000, (PAGES, D), U8),
        "kv_indices": at(0x300000, (NNZ,), I32),
        "kv_indptr": at(0x400000, (T + 1,), I32),
        "attn_sink": at(0x500000, (H,), F32),
        "kv_scales": at(0x600000, (PAGES, D // 64), F32),
        "out": at(0x700000, (T, H, D), BF16),
        "workspace": at(0x800000, (1 << 24,), U8),
        "stream": 7,
    }
    return given | changes


class Recorder:
    """Stands for a loaded kernel: keeps the arguments that it would be launched with."""

    made: typing.ClassVar[list] = []

    def __init__(self, *geometry):
        pass

    def __call__(self, params, stream):
        pointer = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        Recorder.made.append((PARAMS.unpack(ctypes.string_at(pointer, PARAMS.size)), stream))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A Hopper GPU as far as a call can see; counts the calls that are checked in full."""
    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr(cuda, "_cupy", lambda: types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(cuda, "device_properties", lambda number: ("90", 132))
    monkeypatch.setattr(cuda, "refuse_cold_capture", lambda: None)
    monkeypatch.setattr(cuda.jit, "load", lambda *a: 1)
    monkeypatch.setattr(cuda, "Launch", Recorder)
    monkeypatch.setattr(cuda, "_prepared", {})
    monkeypatch.setattr(ops, "_calls", {})
    monkeypatch.setattr(Recorder, "made", [])
    seen = []
    checked = checks.decode
    monkeypatch.setattr(checks, "decode", lambda *a: seen.append(1) or checked(*a))
    arrays.view("q", call()["q"])  # the type is known
    return seen


def test_a_warm_call_is_not_checked_again_and_launches_the_same(device):
    paged_decode(**call())
    cold = list(Recorder.made)
    Recorder.made.clear()
    assert paged_decode(**(given := call())) is given["out"]
    assert len(device) == 1
    assert Recorder.made == cold
    (params, stream), *_ = cold
    assert stream == 7
    assert params[:9] == (0x100000, 0x200000, 0x600000, 0x300000, 0x400000, 0x500000, 0x700000, 0, 0x800000)
    assert params[10:17] == (H * D, D, H * D, D, D, 0, D // 64)
    assert params[17] == pytest.approx(D**-0.5 * cuda.LOG2_E, rel=1e-6)
    assert params[18:23] == (PAGES, 1, T, H, NNZ)


def test_a_warm_call_takes_new_addresses_and_factor(device):
    paged_decode(**call())
    Recorder.made.clear()
    paged_decode(**call(q=at(0x900000, (T, H, D), BF16), softmax_scale=0.5))
    assert len(device) == 1
    assert Recorder.made[0][0][0] == 0x900000
    assert Recorder.made[0][0][17] == pytest.approx(0.5 * cuda.LOG2_E, rel=1e-6)


ANEW = {
    "nnz": {"kv_indices": at(0x300000, (NNZ + 1,), I32)},
    "more pages": {
        "unified_kv": at(0x200000, (PAGES + 1, D), U8),
        "kv_scales": at(0x600000, (PAGES + 1, D // 64), F32),
    },
    "pool strides": {"unified_kv": at(0x200000, (PAGES, D), U8, (D + 64, 1))},
    "q strides": {"q": at(0x100000, (T, H, D), BF16, (4 * H * D, 2 * D, 2))},
    "dtype": {"q": at(0x100000, (T, H, D), np.float16), "out": at(0x700000, (T, H, D), np.float16)},
    "pool dtype": {"unified_kv": at(0x200000, (PAGES, D), U8).view(ml_dtypes.float8_e4m3fn)},
    "no sink": {"attn_sink": None},
    "group size": {"group_size": 128, "kv_scales": at(0x600000, (PAGES, D // 128), F32)},
    "splits": {"num_splits": 1},
    "invariant": {"batch_invariant": True},
    "pool alignment": {"unified_kv": at(0x200008, (PAGES, D), U8)},
    "scales alignment": {"kv_scales": at(0x600004, (PAGES, D // 64), F32)},
    "workspace size": {"workspace": at(0x800000, (1 << 23,), U8)},
}


@pytest.mark.parametrize("change", ANEW.values(), ids=ANEW)
def test_another_layout_option_or_alignment_is_decided_anew(device, change):
    paged_decode(**call())
    Recorder.made.clear()
    paged_decode(**call(**change))
    after_other = list(Recorder.made)
    assert len(device) == 2
    ops._calls.clear()
    Recorder.made.clear()
    paged_decode(**call(**change))
    assert Recorder.made == after_other


REFUSED = {
    "indices address": ({"kv_indices": at(0x300002, (NNZ,), I32)}, ValueError),
    "workspace address": ({"workspace": at(0x800008, (1 << 24,), U8)}, ValueError),
    "workspace too small": ({"workspace": at(0x800000, (16,), U8)}, ValueError),
    "workspace dtype": ({"workspace": at(0x800000, (1 << 24,), np.int8)}, TypeError),
    "overlapping out": ({"out": at(0x700000, (T, H, D), BF16, (0, 2 * D, 2))}, ValueError),
    "another device": ({"kv_scales": at(0x600000, (PAGES, D // 64), F32, device=1)}, ValueError),
    "host array": ({"kv_indptr": np.zeros(T + 1, I32)}, TypeError),
    "True for 1": ({"num_splits": True}, TypeError),
    "float for int": ({"group_size": 64.0}, TypeError),
    "1 for True": ({"batch_invariant": 1}, TypeError),
    "unhashable": ({"group_size": [64]}, TypeError),
    "nan": ({"softmax_scale": float("nan")}, ValueError),
    "stale scales": ({"unified_kv": at(0x200000, (PAGES + 1, D), U8)}, ValueError),
}


@pytest.mark.parametrize(("change", "error"), REFUSED.values(), ids=REFUSED)
def test_a_warm_layout_lets_no_bad_call_through(device, change, error):
    paged_decode(**call())
    paged_decode(**call(num_splits=1))
    paged_decode(**call(batch_invariant=True))
    Recorder.made.clear()
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(error):
            paged_decode(**call(**change))
    assert Recorder.made == []


def test_results_and_scratch_not_given_are_made_for_every_call(device, monkeypatch):
    made = []

    def empty(like, shape, dtype, stream=None):
        made.append(shape)
        kind = BF16 if dtype == "bfloat16" else dtype
        return arrays.view("", at(0x1000000 * (1 + len(made)), shape, kind))

    monkeypatch.setattr(arrays, "empty", empty)
    bare = call(out=None, workspace=None, return_lse=True)
    paged_decode(**bare)
    shapes = sorted(made)
    made.clear()
    Recorder.made.clear()
    out, lse = paged_decode(**bare)
    assert len(device) == 1
    assert sorted(made) == shapes
    assert out.shape == (T, H, D)
    assert lse.shape == (T, H)
    assert Recorder.made[0][0][6:8] == (out.data.ptr, lse.data.ptr)


def test_the_number_of_remembered_calls_is_bounded(device, monkeypatch):
    monkeypatch.setattr(ops, "_MAX_CALLS", 3)
    for n in range(1, 10):
        paged_decode(**call(kv_indices=at(0x300000, (n,), I32)))
        assert 1 <= len(ops._calls) <= 3


def test_an_array_whose_shape_was_set_in_place_is_decided_anew(device):
    given = call(kv_indices=at(0x300000, (1, NNZ), I32))
    given["kv_indices"].shape = (NNZ,)
    paged_decode(**given)
    given["kv_indices"].shape = (1, NNZ)
    with pytest.raises(ValueError, match="kv_indices"):
        paged_decode(**given)
    given["kv_indices"].shape = (NNZ,)
    Recorder.made.clear()
    paged_decode(**given)
    assert len(device) == 2
    assert Recorder.made[0][0][22] == NNZ


def test_strides_of_axes_of_length_one_do_not_matter(device):
    paged_decode(**call(unified_kv=at(0x200000, (1, D), U8), kv_scales=at(0x600000, (1, D // 64), F32)))
    kernels = len(Recorder.made)
    paged_decode(**call(unified_kv=at(0x200000, (1, D), U8, (3, 1)), kv_scales=at(0x600000, (1, D // 64), F32)))
    assert len(device) == 1
    assert Recorder.made[kernels:] == Recorder.made[:kernels]
    ops._calls.clear()
    cuda._prepared.clear()
    paged_decode(**call(unified_kv=at(0x200000, (1, D), U8, (3, 1)), kv_scales=at(0x600000, (1, D // 64), F32)))
    assert len(device) == 2  # checked in full it passes too


def test_another_current_device_is_seen(device, monkeypatch):
    now = [0]
    runtime = types.SimpleNamespace(getDevice=lambda: now[0], setDevice=lambda n: now.__setitem__(0, n))
    monkeypatch.setattr(cuda, "_cupy", lambda: types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    paged_decode(**call())
    launched = list(Recorder.made)
    now[0] = 1
    paged_decode(**call())
    assert len(device) == 2
    assert Recorder.made == launched * 2
    assert now == [1]
