"""quantize_kv and dequantize_kv: the format, rounding, saturation, special values, and both backends bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from pools import (
    BACKENDS,
    BF16,
    E4M3,
    E4M3_TIES,
    E4M3_VALUES,
    ROW_DTYPES,
    e4m3_code,
    get,
    nearest,
    put,
    rows,
    same_bits,
)

from cupy_paged import fp8
from cupy_paged.storage import dequantize_kv, quantize_kv

KINDS = ["normal", "wide", "special", "tiny", "huge", "ties"]


def expected(kv, group_size, pow2=False):
    """Codes and scales by table search, from the definition in `quantize_kv`."""
    paged = kv if kv.ndim == 3 else kv[:, None]
    pages, slots, head_dim = paged.shape
    x = paged.astype(np.float32).reshape(pages, slots, head_dim // group_size, group_size)
    amax = np.where(np.isfinite(x), np.abs(x), 0).max(axis=(1, 3))
    scale = np.maximum(amax / np.float32(448), np.float32(2.0**-80)).astype(np.float32)
    if pow2:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    with np.errstate(all="ignore"):
        quotient = (x / scale[:, None, :, None]).astype(np.float32)
    codes = e4m3_code(np.where(np.isfinite(x), quotient, x).astype(np.float64))
    return codes.reshape(kv.shape), scale


def test_all_codes_decode_by_definition():
    assert np.array_equal(fp8.decode(np.arange(256, dtype=np.uint8)), E4M3_VALUES, equal_nan=True)


def test_encode_every_tie_and_both_sides_of_it():
    for sign in (1, -1):
        ties = np.float32(sign) * E4M3_TIES.astype(np.float32)
        below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(sign * np.inf))
        codes = np.arange(0x7E, dtype=np.uint8)
        top = np.uint8(0 if sign == 1 else 0x80)
        assert np.array_equal(fp8.encode(below, np.float32(1)), codes | top)
        assert np.array_equal(fp8.encode(above, np.float32(1)), codes + 1 | top)
        assert np.array_equal(fp8.encode(ties, np.float32(1)), codes + codes % 2 | top)


def test_encode_saturates_and_marks_what_is_not_finite():
    x = np.array([448, 464, 465, 480, 1e4, -1e4, np.nan, np.inf, -np.inf], np.float32)
    assert fp8.encode(x, np.float32(1)).tolist() == [0x7E] * 5 + [0xFE] + [0x7F] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize(
    ("shape", "group_size"), [((65, 512), 64), ((33, 384), 32), ((9, 3, 128), 128), ((5, 64, 192), 64)]
)
def test_quantize_equals_table_search(backend, dtype, shape, group_size):
    for kind in KINDS:
        kv = rows(kind, int(np.prod(shape[:-1])), shape[-1], ROW_DTYPES[dtype]).reshape(shape)
        for scale_format in ("float32", "pow2"):
            codes, scales = expected(kv, group_size, scale_format == "pow2")
            got = quantize_kv(put(backend, kv), group_size=group_size, scale_format=scale_format)
            same_bits(got.scales, scales)
            same_bits(got.codes, codes)


@pytest.mark.gpu
def test_quotients_round_as_division_does():
    """A few million quotients next to rounding ties, and every float16 under many scales."""
    for seed in range(4):
        kv = rows("ties", 20000, 512, np.float32, seed)
        got, want = quantize_kv(put("cupy", kv)), quantize_kv(kv)
        same_bits(got.scales, want.scales)
        same_bits(got.codes, want.codes)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    kv = np.resize(halves, (4096, 512))
    kv[:, ::64] = halves[-4096:, None]
    same_bits(quantize_kv(put("cupy", kv)).codes, quantize_kv(kv).codes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_get_a_finite_scale_and_stay_zero(backend):
    got = quantize_kv(put(backend, np.zeros((64, 512), BF16)))
    assert (get(got.codes) == 0).all()
    assert np.isfinite(get(got.scales)).all()
    assert (get(got.scales) > 0).all()
    assert (get(dequantize_kv(got.codes, got.scales)) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values_stay_in_their_elements(backend):
    kv = rows("normal", 8, 512, np.float32)
    clean = quantize_kv(put(backend, kv))
    kv[3, 70], kv[3, 71], kv[3, 72] = np.nan, np.inf, -np.inf
    got = quantize_kv(put(backend, kv))
    changed = get(got.codes) != get(clean.codes)
    assert set(zip(*np.nonzero(changed), strict=True)) <= {(3, i) for i in range(64, 128)}
    assert (get(got.codes)[3, 70:73] == 0x7F).all()
    assert np.isfinite(get(got.scales)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_dequantize_is_exact_and_rounded_once(backend, dtype, page_size):
    rng = np.random.default_rng(5)
    pages = 64
    codes = np.resize(np.arange(256, dtype=np.uint8), (pages, page_size, 512))
    scales = rng.standard_normal((pages, 8)) * np.exp2(rng.uniform(-20, 10, (pages, 8)))
    scales[:24] *= np.exp2(rng.uniform(-130, 110, (24, 8)))  # into subnormal and infinite results
    with np.errstate(over="ignore", under="ignore"):
        scales = scales.astype(np.float32)
    scales[24, :4] = 0, np.inf, np.nan, 1e-45
    with np.errstate(all="ignore"):
        exact = E4M3_VALUES[codes] * np.repeat(scales.astype(np.float64), 64, axis=1)[:, None]
    want = nearest(exact, ROW_DTYPES[dtype])
    if page_size == 1:
        codes, want = codes[:, 0], want[:, 0]
    same_bits(dequantize_kv(put(backend, codes.view(E4M3)), put(backend, scales), dtype), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arbitrary_scales_are_not_narrowed(backend):
    kv = rows("normal", 4, 512, np.float32) * np.array([[0.7], [1.3], [3.1e-3], [97.3]], np.float32)
    got = quantize_kv(put(backend, kv))
    want = (E4M3_VALUES[get(got.codes)] * np.repeat(get(got.scales).astype(np.float64), 64, axis=1)).astype(np.float32)
    same_bits(dequantize_kv(got.codes, got.scales), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_misaligned_rows(backend):
    kv = rows("normal", 20, 512, BF16)
    wide = np.zeros((20, 600), BF16)
    for begin in (0, 3, 8):
        wide[:, begin : begin + 512] = kv
        got, want = quantize_kv(put(backend, wide)[:, begin : begin + 512]), quantize_kv(kv)
        same_bits(got.codes, want.codes)
        same_bits(got.scales, want.scales)
    got = quantize_kv(put(backend, kv)[::3])
    same_bits(got.codes, quantize_kv(kv[::3]).codes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_quantize(backend):
    got = quantize_kv(put(backend, np.zeros((0, 512), BF16)))
    assert got.codes.shape == (0, 512)
    assert got.scales.shape == (0, 8)
    assert dequantize_kv(got.codes, got.scales).shape == (0, 512)


def test_kind_of_result():
    got = quantize_kv(np.ones((2, 64), np.float32))
    assert got.codes.dtype == E4M3
    assert get(got.codes)[0, 0] == 0x7E
    assert dequantize_kv(got.codes, got.scales, BF16).dtype == BF16
    assert dequantize_kv(get(got.codes), got.scales, np.float16).dtype == np.float16


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize_kv(None), TypeError, "kv is missing"),
        (lambda: quantize_kv(np.ones((2, 64), np.float64)), TypeError, "float64"),
        (lambda: quantize_kv(np.ones(64, np.float32)), ValueError, "(64,)"),
        (lambda: quantize_kv(np.ones((2, 100), np.float32)), ValueError, "multiple of 64"),
        (lambda: quantize_kv(np.ones((2, 192), np.float32), group_size=128), ValueError, "D = 192, group_size = 128"),
        (lambda: quantize_kv(np.ones((2, 64), np.float32), scale_format="ue8m0"), ValueError, "ue8m0"),
        (lambda: quantize_kv(np.ones((64, 2), np.float32).T), ValueError, "contiguous"),
        (lambda: quantize_kv(np.full((2, 64), np.inf, BF16), validate=True), ValueError, "kv[0, 0] is inf"),
        (lambda: dequantize_kv(np.ones((2, 64), np.uint8), None), TypeError, "scales is missing"),
        (lambda: dequantize_kv(np.ones((2, 64), np.uint8), np.ones((2, 1), np.float64)), TypeError, "float64"),
        (lambda: dequantize_kv(np.ones((2, 64), np.uint8), np.ones((2, 1), np.float32), "int8"), TypeError, "int8"),
        (lambda: dequantize_kv(np.ones((2, 64), BF16), np.ones((2, 1), np.float32)), TypeError, "bfloat16"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)
