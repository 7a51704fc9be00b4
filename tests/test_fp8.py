"""e4m3fn codes and group scales: every code, every rounding tie, saturation, groups, NaN."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import oracle
import pytest

from cupy_paged import fp8

CODES = np.arange(256, dtype=np.uint8)
ONE = np.float32(1)
POSITIVE = oracle.E4M3FN[:127]  # 0 to 448, one a code
SCALE_MIN = 2.0**-80


def test_decode_gives_the_value_of_every_code():
    values = fp8.decode(CODES)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, oracle.E4M3FN.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(values[:0x7F]), False)
    np.testing.assert_array_equal(np.signbit(values[0x80:0xFF]), True)


def test_encode_is_the_inverse_of_decode():
    codes = fp8.encode(fp8.decode(CODES), ONE)
    expected = CODES.copy()
    expected[0xFF] = 0x7F  # one NaN code is written
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_encode_rounds_to_nearest_and_ties_to_even(sign):
    middle = ((POSITIVE[:-1] + POSITIVE[1:]) / 2).astype(np.float32)  # exact: 5 significant bits
    low = np.arange(126, dtype=np.uint8)
    bit = np.uint8(0x80 if sign < 0 else 0)
    even = low + (low & 1)
    np.testing.assert_array_equal(fp8.encode(sign * middle, ONE), even | bit)
    np.testing.assert_array_equal(fp8.encode(sign * np.nextafter(middle, np.float32(0)), ONE), low | bit)
    np.testing.assert_array_equal(fp8.encode(sign * np.nextafter(middle, np.float32(1e9)), ONE), (low + 1) | bit)


def test_encode_saturates_and_never_overflows_to_nan():
    x = np.array([448, 463.9, 464, 465, 480, 1e4, 3.4e38, -448, -464, -1e4, -3.4e38], np.float32)
    np.testing.assert_array_equal(fp8.encode(x, ONE), [0x7E] * 7 + [0xFE] * 4)
    np.testing.assert_array_equal(fp8.encode(x[6:7], np.float32(SCALE_MIN)), [0x7E])  # the quotient is infinite


def test_encode_marks_nan_and_infinity():
    x = np.array([np.nan, np.inf, -np.inf, -np.nan, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(fp8.encode(x, ONE), [0x7F, 0x7F, 0x7F, 0x7F, 0x00, 0x80])


@pytest.mark.parametrize("seed", range(4))
def test_encode_divides_exactly_before_it_rounds(seed):
    """code = e4m3fn(float32(x / scale)), with the quotient from exact fractions."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(200) * 10.0 ** rng.integers(-3, 3, 200)).astype(np.float32)
    scale = np.float32(rng.uniform(0.01, 3))
    quotient = [np.float32(float(Fraction(float(v)) / Fraction(float(scale)))) for v in x]
    magnitudes = [min(abs(Fraction(float(v))), Fraction(448)) for v in quotient]
    grid = [Fraction(float(v)) for v in POSITIVE]
    nearest = [min(range(127), key=lambda c: (abs(grid[c] - m), c & 1)) for m in magnitudes]
    expected = [c | (0x80 if v < 0 else 0) for c, v in zip(nearest, x, strict=True)]
    np.testing.assert_array_equal(fp8.encode(x, scale), expected)


def test_scale_of_amax():
    amax = np.array([0, 448, 1, 3e38, 1e-30, 448 * SCALE_MIN], np.float32)
    scale = fp8.scale_of_amax(amax, False)
    expected = np.array([SCALE_MIN, 1, np.float32(1) / np.float32(448), 3e38 / 448, SCALE_MIN, SCALE_MIN], np.float32)
    np.testing.assert_array_equal(scale, expected)
    assert scale.dtype == np.float32


def test_pow2_scale_is_the_least_power_of_two_that_reaches():
    rng = np.random.default_rng(5)
    exact = 448 * 2.0 ** np.arange(-70, 100)
    amax = np.concatenate([exact, np.nextafter(exact.astype(np.float32), np.float32(np.inf)), rng.uniform(0, 9, 100)])
    amax = amax.astype(np.float32)
    plain, scale = fp8.scale_of_amax(amax, False), fp8.scale_of_amax(amax, True)
    assert scale.dtype == np.float32
    mantissa, _ = np.frexp(scale)
    np.testing.assert_array_equal(mantissa, 0.5)
    assert (scale >= plain).all()
    assert (scale / 2 < plain).all()


def test_finite_amax_leaves_out_what_is_not_finite():
    x = np.array([[1, -3, np.nan], [np.inf, 2, -np.inf], [np.nan, np.nan, np.inf]], np.float32)
    np.testing.assert_array_equal(fp8.finite_amax(x, 1), [3, 2, 0])


@pytest.mark.parametrize("shape", [(5, 256), (3, 4, 128), (0, 128), (2, 1, 512)])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("pow2", [False, True])
def test_quantize_takes_one_scale_for_a_group_of_a_page(shape, group_size, dtype, pow2):
    rng = np.random.default_rng(7)
    x = (rng.standard_normal(shape) * 10).astype(dtype)
    codes, scales = fp8.quantize(x, group_size, pow2)
    assert codes.shape == shape
    assert codes.dtype == np.uint8
    assert scales.shape == (shape[0], shape[-1] // group_size)
    pages = x.astype(np.float32).reshape(shape[0], shape[1] if len(shape) == 3 else 1, shape[-1])
    for page in range(shape[0]):
        for group in range(scales.shape[1]):
            part = np.s_[group * group_size : (group + 1) * group_size]
            amax = max(abs(float(v)) for v in pages[page][:, part].ravel())
            exact = np.float32(amax) / np.float32(448)
            if pow2:
                assert exact <= scales[page, group] < 2 * exact
            else:
                assert scales[page, group] == exact
    # Half a unit in the last place: 1/16 of a value, or 2**-10 of the scale among the subnormal codes.
    values = oracle.dequantized(codes, scales, group_size).reshape(x.shape)
    unit = np.repeat(np.repeat(scales[:, None], pages.shape[1], 1), group_size, 2).reshape(shape) * 2.0**-10
    assert (
        np.abs(values - x.astype(np.float64)) <= np.maximum(np.abs(x.astype(np.float64)) / 16, unit) * 1.000001
    ).all()


def test_an_all_zero_group_has_a_finite_scale_and_zero_codes():
    codes, scales = fp8.quantize(np.zeros((64, 512), np.float32), 64, False)
    np.testing.assert_array_equal(codes, 0)
    np.testing.assert_array_equal(scales, np.float32(SCALE_MIN))


def test_nan_and_infinity_leave_their_neighbours_alone():
    x = np.random.default_rng(8).standard_normal((2, 128)).astype(np.float32)
    clean, clean_scales = fp8.quantize(x, 64, False)
    small = int(np.argmin(np.abs(x[0, :64])))
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[0, small] = bad
        codes, scales = fp8.quantize(spoilt, 64, False)
        np.testing.assert_array_equal(scales, clean_scales)
        assert codes[0, small] == 0x7F
        codes[0, small] = clean[0, small]
        np.testing.assert_array_equal(codes, clean)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dequantize_rounds_the_exact_product_once(dtype):
    """All 254 numbers times awkward scales; the nearest number of `dtype` is found with exact fractions."""
    codes = np.array([c for c in CODES if c not in (0x7F, 0xFF)] + [0, 0], np.uint8).reshape(2, 128)
    scales = np.array([[0.7, 1.3, 3.1e-3, 97.3], [1 / 3, 1.0000001, 1e-6, 129.99998]], np.float32)
    got = fp8.dequantize(codes[:, None], scales, 32, dtype)[:, 0]
    assert got.dtype == dtype
    bits = {np.dtype(np.float32): 24, np.dtype(np.float16): 11}.get(np.dtype(dtype), 8)
    least = {24: -149, 11: -24, 8: -133}[bits]
    for r in range(2):
        for d in range(128):
            exact = Fraction(oracle.E4M3FN[codes[r, d]]) * Fraction(float(scales[r, d // 32]))
            assert Fraction(float(got[r, d])) == _rounded(exact, bits, least), (r, d)


def _rounded(exact, bits, least):
    """`exact` to `bits` significant bits, nearest even, in units of no less than 2**least."""
    if exact == 0:
        return exact
    exponent = 0
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - bits + 1, least)
    return round(exact / unit) * unit  # Python rounds halves of a Fraction to even


def test_round_once_does_not_round_twice():
    """Just above a tie of bfloat16, by less than float32 can hold: rounding by way of float32 would go down."""
    exact = np.array([1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40), 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40])
    got = fp8.round_once(exact, ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(got, [1 + 2.0**-7, -(1 + 2.0**-7), 1, 1 + 2.0**-7])
