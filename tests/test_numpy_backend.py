"""The NumPy backend against the float64 oracle: a seeded sweep, and every edge of the contract."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import ml_dtypes
import numpy as np
import oracle
import pytest
from calls import draw

from cupy_paged import merge_states, paged_decode
from cupy_paged.backends import numpy as backend

BF16, FP16, F32, FP8 = ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn

# Relative Frobenius error allowed. The backend computes in float64, so that only the rounding into the output's dtype
# is left: with p significant bits a number is off by at most 2**-p of itself, and so is the norm. The excess of a
# thousandth is for the order of float64 additions.
TOLERANCE = {
    "bfloat16": 2.0**-8 * 1.001,  # p = 8
    "float16": 2.0**-11 * 1.001,  # p = 11
    "float32": 2.0**-24 * 1.001,  # p = 24: lse, and merged float32 parts
}


def check(call, sink=None, softmax_scale=None, **options):
    """Run a call and compare out and lse with the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = paged_decode(**call, attn_sink=sink, softmax_scale=softmax_scale, return_lse=True, **options)
    assert out.dtype == call["q"].dtype
    assert lse.dtype == F32
    rows = oracle.dequantized(call["unified_kv"], call.get("kv_scales"), call.get("group_size", 64))
    exact, exact_lse = oracle.attention(call["q"], rows, call["kv_indices"], call["kv_indptr"], sink, softmax_scale)
    oracle.compare(out, exact, TOLERANCE[out.dtype.name])
    oracle.compare(lse, exact_lse, TOLERANCE["float32"])
    return out, lse


def base(seed=0, **options):
    return draw(
        np.random.default_rng(seed), **{"t": 4, "h": 3, "d": 128, "lengths": [5, 9, 1, 6], "pages": 40} | options
    )


def bits(a):
    return np.ascontiguousarray(a).view(np.uint8).tobytes()


def padded(a):
    """The same values in an array whose rows lie apart, with a contiguous last axis."""
    wide = np.zeros((*a.shape[:-1], a.shape[-1] + 48), a.dtype)
    wide[..., 16 : 16 + a.shape[-1]] = a
    return wide[..., 16 : 16 + a.shape[-1]]


@pytest.mark.parametrize("seed", range(120))
def test_random_call(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.choice([64, 128, 192, 256, 320, 384, 448, 512]))
    h = int(rng.choice([1, 2, 3, 5, 7, 8, 13, 16]))
    t = int(rng.integers(1, 5))
    group = int(rng.choice([g for g in (32, 64, 128) if d % g == 0]))
    call = draw(
        rng,
        t=t,
        h=h,
        d=d,
        lengths=rng.integers(0, 24, t),
        pages=int(rng.integers(1, 30)),
        page_size=int(rng.choice([1, 1, 2, 3, 16])),
        q_dtype=[BF16, FP16][rng.integers(2)],
        kv=str(rng.choice(["fp8", "fp8", "16"])),
        group=group,
        bad=float(rng.choice([0, 0.3, 1], p=[0.5, 0.4, 0.1])),
        strided=bool(rng.integers(2)),
    )
    sink = rng.standard_normal(h).astype(F32) * 5 if rng.random() < 0.5 else None
    if rng.random() < 0.5:  # a plain uint8 array of codes, and rows that do not adjoin
        for name in ("q", "unified_kv", "kv_scales"):
            if name in call:
                call[name] = padded(call[name])
        if call["unified_kv"].dtype == FP8:
            call["unified_kv"] = call["unified_kv"].view(np.uint8)
        call["kv_indices"] = np.repeat(call["kv_indices"], 2)[::2]
    check(call, sink, float(rng.uniform(-1, 1)) if rng.random() < 0.3 else None)


@pytest.mark.parametrize("kv", ["fp8", "16"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_strides_do_not_change_a_bit(kv, page_size):
    call = base(kv=kv, page_size=page_size)
    sink = np.linspace(-1, 1, 6, dtype=F32)[::2]
    plain = paged_decode(**call, attn_sink=sink.copy())
    heads_first = np.ascontiguousarray(call["q"].transpose(1, 0, 2)).transpose(1, 0, 2)
    strided = {**call, "q": heads_first, "unified_kv": padded(call["unified_kv"])}
    strided["kv_indices"] = np.repeat(call["kv_indices"], 3)[::3]
    strided["kv_indptr"] = np.repeat(call["kv_indptr"], 2)[::2]
    if kv == "fp8":
        strided["kv_scales"] = padded(call["kv_scales"])
    out = np.zeros((3, 4, 256), BF16)[:, ::-1, 64:192].transpose(1, 0, 2)
    whole = out.base
    assert paged_decode(**strided, attn_sink=sink, out=out) is out
    assert bits(out) == bits(plain)
    assert not whole[..., :64].any()
    assert not whole[..., 192:].any()


def test_pools_read_backwards_and_uint8_codes():
    call = base(page_size=2)
    plain = paged_decode(**call)
    turned = np.ascontiguousarray(call["unified_kv"][::-1])[::-1].view(np.uint8)
    assert turned.strides[0] < 0
    assert bits(paged_decode(**{**call, "unified_kv": turned})) == bits(plain)


@pytest.mark.parametrize("length", [backend.CHUNK - 1, backend.CHUNK, backend.CHUNK + 1, 2 * backend.CHUNK + 77])
def test_long_rows_are_taken_in_chunks(length):
    call = base(t=1, h=2, d=64, lengths=[length], pages=500)
    call["kv_scales"] *= np.linspace(0.1, 3, 500, dtype=F32)[:, None]
    check(call, np.array([1.5, -2], F32))


def test_the_largest_score_in_the_last_chunk_takes_all():
    """Earlier chunks are rescaled to nothing, without a remnant."""
    call = base(t=1, h=1, d=64, lengths=[0], pages=3, kv="16")
    call["q"][:] = 1
    call["unified_kv"][:] = np.array([-200, 1, 200])[:, None]
    call["kv_indices"] = np.array([0] * backend.CHUNK + [1] * backend.CHUNK + [2], np.int32)
    call["kv_indptr"] = np.array([0, 2 * backend.CHUNK + 1], np.int32)
    out, lse = check(call)
    assert (out.astype(F32) == 200).all()
    assert lse[0, 0] == 1600


def test_no_tokens():
    call = base(t=0, lengths=[])
    out, lse = paged_decode(**call, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 3, 128), (0, 3))
    assert merge_states([out, out], [lse, lse])[0].shape == (0, 3, 128)


def assert_empty(out, lse):
    assert bits(out) == bytes(out.nbytes)
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("sink", [None, 0.0, math.inf, -math.inf, math.nan])
def test_rows_without_slots(sink):
    call = base()
    sinks = None if sink is None else np.full(3, sink, F32)
    nothing = {**call, "kv_indices": np.empty(0, np.int32), "kv_indptr": np.zeros(5, np.int32)}
    out = np.full(call["q"].shape, np.nan, BF16)
    assert_empty(*paged_decode(**nothing, attn_sink=sinks, out=out, return_lse=True))
    skipped = {**call, "kv_indices": np.full_like(call["kv_indices"], -1)}
    assert_empty(*paged_decode(**skipped, attn_sink=sinks, return_lse=True))
    no_pages = {**call, "unified_kv": call["unified_kv"][:0], "kv_scales": call["kv_scales"][:0]}
    assert_empty(*paged_decode(**no_pages, attn_sink=sinks, return_lse=True))


def test_empty_rows_among_others():
    call = base()
    call["kv_indptr"] = np.array([0, 6, 6, 12, 12], np.int32)
    out, lse = check(call, out=np.full(call["q"].shape, np.nan, BF16))
    assert_empty(out[1::2], lse[1::2])


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_outside_the_pool_are_dropped(page_size):
    call = base(page_size=page_size, lengths=[6, 6, 6, 6])
    slots = 40 * page_size
    good = call["kv_indices"][:24].reshape(4, 6)
    bad = np.array([-1, slots, slots + 10**6, 2**31 - 1, -(2**31)], np.int32)
    mixed = np.concatenate([good[:, :3], np.tile(bad, (4, 1)), good[:, 3:]], 1)
    with_bad = {**call, "kv_indices": mixed.ravel(), "kv_indptr": np.arange(5, dtype=np.int32) * 11}
    for got, expected in zip(
        paged_decode(**with_bad, return_lse=True), paged_decode(**call, return_lse=True), strict=True
    ):
        assert bits(got) == bits(expected)


def test_a_slot_listed_twice_counts_twice():
    call = base(t=1, lengths=[1])
    once, lse_once = paged_decode(**call, return_lse=True)
    call["kv_indices"], call["kv_indptr"] = call["kv_indices"][[0, 0]], np.array([0, 2], np.int32)
    twice, lse_twice = check(call)
    assert bits(once) == bits(twice)
    np.testing.assert_allclose(lse_twice - lse_once, math.log(2), rtol=1e-5)


def test_sinks():
    call = base()
    plain, lse = paged_decode(**call, return_lse=True)
    sink = np.array([-math.inf, 0.7, math.inf], F32)
    out, lse_with = paged_decode(**call, attn_sink=sink, return_lse=True)
    assert bits(lse) == bits(lse_with), "lse leaves the sink out"
    assert bits(out[:, 0]) == bits(plain[:, 0])
    assert not out[:, 2].astype(F32).any()
    check(call, np.array([-2, 0.7, 30], F32))
    huge = paged_decode(**call, attn_sink=np.array([-3e38, 3e38, math.nan], F32))
    assert bits(huge[:, 0]) == bits(plain[:, 0])
    assert not huge[:, 1].astype(F32).any()
    assert np.isnan(huge[:, 2].astype(F32)).all()


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("group_size", [32, 64])
def test_one_hot_rows_come_back_where_they_were(head_dim, group_size):
    """Slot d holds 1 at d alone, with another scale in every group: token d gets that scale at d and 0 elsewhere."""
    groups = head_dim // group_size
    scales = np.tile(2.0 ** np.arange(groups, dtype=F32) / 64, (head_dim, 1)).astype(F32)
    codes = np.zeros((head_dim, head_dim), np.uint8)
    np.fill_diagonal(codes, 0x38)  # 1.0
    steps = np.arange(head_dim + 1, dtype=np.int32)
    q = np.ones((head_dim, 1, head_dim), BF16)
    out = paged_decode(q, codes, steps[:-1], steps, kv_scales=scales, group_size=group_size)
    expected = np.diag(np.repeat(scales[0], group_size)).astype(F32)
    np.testing.assert_array_equal(out[:, 0].astype(F32), expected)


def test_heads_and_tokens_are_not_mixed():
    """Token t lists slots of the constant t + 1: every head of it gives that."""
    pool = np.repeat(np.arange(1, 6), 3)[:, None].repeat(64, 1).astype(BF16)
    q = np.random.default_rng(1).standard_normal((5, 32, 64)).astype(BF16)
    out = paged_decode(q, pool, np.arange(15, dtype=np.int32), np.arange(6, dtype=np.int32) * 3)
    np.testing.assert_array_equal(out.astype(F32), np.broadcast_to(np.arange(1, 6)[:, None, None], out.shape))


def test_scales_are_exact_float32():
    scales = np.array([[0.7], [1.3], [3.1e-3], [97.3], [1e-40]], F32)  # the last is subnormal
    codes = np.random.default_rng(2).integers(0, 127, (5, 64)).astype(np.uint8)
    steps = np.arange(6, dtype=np.int32)
    out = paged_decode(np.zeros((5, 1, 64), BF16), codes, steps[:-1], steps, kv_scales=scales)
    expected = (oracle.E4M3FN[codes] * scales.astype(np.float64)).astype(F32)  # 28 bits: off a tie by more than 2**-25
    np.testing.assert_array_equal(out[:, 0].astype(F32), expected.astype(BF16).astype(F32))


def test_out_is_rounded_once():
    """1.25 * scale = 1 + 2**-8 + 2**-25: above the tie of two bf16 numbers, by less than float32 can hold."""
    scale = 6737101 / 2**23
    assert 1.25 * scale == 1 + 2.0**-8 + 2.0**-25
    steps = np.arange(2, dtype=np.int32)
    codes, scales = np.full((1, 64), 0x3A, np.uint8), np.full((1, 1), scale, F32)
    out = paged_decode(np.zeros((1, 1, 64), BF16), codes, steps[:1], steps, kv_scales=scales)
    assert (out.astype(F32) == 1 + 2.0**-7).all()


@pytest.mark.parametrize("count", [1, backend.CHUNK])
@pytest.mark.parametrize("followed", [False, True])
def test_scores_of_minus_infinity_weigh_nothing(count, followed):
    """An infinite element against a negative query: its own place becomes NaN, the others are as without the row."""
    q = np.full((1, 1, 64), -1, BF16)
    pool = np.full((2, 64), 0.5, BF16)
    pool[0, 3] = math.inf
    slots = np.array([0] * count + [1] * followed, np.int32)
    out, lse = paged_decode(q, pool, slots, np.array([0, len(slots)], np.int32), return_lse=True)
    expected = np.full(64, 0.5 if followed else 0, F32)
    expected[3] = math.nan
    np.testing.assert_array_equal(out[0, 0].astype(F32), expected)
    np.testing.assert_array_equal(lse[0, 0], F32(-32 / 8 if followed else -math.inf))


@pytest.mark.parametrize("kv", ["fp8", "16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_only_the_tokens_that_refer_to_them(kv, bad):
    call = base(kv=kv, pages=40)
    call["kv_indices"] = (np.arange(len(call["kv_indices"])) % 39).astype(np.int32)  # slot 39 is unreferenced
    plain, lse = paged_decode(**call, return_lse=True)

    def spoil(slot):
        pool = call["unified_kv"].copy()
        changed = {**call, "unified_kv": pool}
        if kv == "16":
            pool[slot, 3] = bad
        elif math.isnan(bad):
            pool.view(np.uint8)[slot, 3] = 0x7F
        else:
            changed["kv_scales"] = call["kv_scales"].copy()
            changed["kv_scales"][slot, 0] = bad
        return paged_decode(**changed, return_lse=True)

    out, lse_now = spoil(39)
    assert bits(out) == bits(plain)
    assert bits(lse) == bits(lse_now)

    out, lse_now = spoil(int(call["kv_indices"][7]))  # in the list of token 1 alone
    others = [0, 2, 3]
    assert bits(out[others]) == bits(plain[others])
    assert bits(lse[others]) == bits(lse_now[others])
    assert (~np.isfinite(out[1].astype(F32))).any(axis=1).all(), "every head of token 1 shows it"


def test_nan_queries_stay_in_their_head():
    call = base()
    plain = paged_decode(**call)
    call["q"][2, 1, 5] = math.nan
    out, lse = paged_decode(**call, return_lse=True)
    assert np.isnan(out[2, 1].astype(F32)).all()
    assert np.isnan(lse[2, 1])
    out[2, 1] = plain[2, 1]
    assert bits(out) == bits(plain)


@pytest.mark.parametrize(
    ("indptr", "equal"),
    [
        ([0, 5, 3, 9, 12], [0, 5, 5, 9, 12]),  # token 1 ends before it begins; token 2 is 3:9
        ([-7, 5, 8, 9, 12], [0, 5, 8, 9, 12]),
        ([0, 5, 8, 9, 10**6], [0, 5, 8, 9, 26]),
        ([-(2**31), 2**31 - 1, 0, 26, 2**31 - 1], [0, 26, 26, 26, 26]),
        ([900, 800, 700, -1, -5], [26, 26, 26, 26, 26]),
    ],
)
def test_malformed_indptr_is_harmless(indptr, equal):
    """Ends are clamped into kv_indices, and a list that ends before it begins is empty."""
    call = base(lengths=[5, 9, 1, 6])
    assert len(call["kv_indices"]) == 26
    call["kv_indptr"] = np.array(indptr, np.int32)
    out, lse = check(call)
    expected_empty = [max(0, min(b, 26)) <= max(0, min(a, 26)) for a, b in pairwise(indptr)]
    np.testing.assert_array_equal(np.isneginf(lse[:, 0]), expected_empty)
    for t in range(4):
        if equal[t + 1] > equal[t] and max(indptr[t], 0) == equal[t]:
            alone = {**call, "q": call["q"][t : t + 1], "kv_indptr": np.array(equal[t : t + 2], np.int32)}
            assert bits(paged_decode(**alone)) == bits(out[t : t + 1])


@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 7}, {"batch_invariant": True}])
def test_modes_change_nothing(options):
    call = base(lengths=[5, 200, 0, 30])
    for got, expected in zip(
        paged_decode(**call, **options, return_lse=True), paged_decode(**call, return_lse=True), strict=True
    ):
        assert bits(got) == bits(expected)


def test_a_token_alone_gives_the_same_bits():
    call = base(t=7, h=16, lengths=[5, 1500, 0, 30, 64, 1, 333])
    out, lse = paged_decode(**call, return_lse=True)
    for t in range(7):
        alone = {**call, "q": call["q"][t : t + 1], "kv_indptr": call["kv_indptr"][t : t + 2]}
        one, one_lse = paged_decode(**alone, return_lse=True)
        assert bits(one) == bits(out[t : t + 1])
        assert bits(one_lse) == bits(lse[t : t + 1])


@pytest.mark.parametrize("q_dtype", [BF16, FP16])
def test_finite_rows_never_overflow(q_dtype):
    """Numbers at the top of float32, queries at the top of their dtype: out and lse stay finite, at the largest."""
    scales = np.full((4, 2), 3.4028235e38 / 448, F32)
    codes = np.full((4, 128), 0x7E, np.uint8)
    q = np.full((2, 2, 128), ml_dtypes.finfo(q_dtype).max, q_dtype)
    q[1] = -q[1]
    steps = np.array([0, 4, 8], np.int32)
    out, lse = paged_decode(
        q, codes, np.tile(np.arange(4, dtype=np.int32), 2), steps, kv_scales=scales, return_lse=True
    )
    np.testing.assert_array_equal(out.astype(F32), np.full(out.shape, float(ml_dtypes.finfo(q_dtype).max), F32))
    assert np.isfinite(lse).all()
    assert (lse[0] > 0).all()
    assert (lse[1] < 0).all()


@pytest.mark.parametrize("softmax_scale", [0.05, 1, np.float32(0.05), np.float64(-0.3), 0])
def test_softmax_scale(softmax_scale):
    check(base(), softmax_scale=softmax_scale)


def test_out_may_be_q():
    call = base()
    expected = paged_decode(**call)
    paged_decode(**call, out=call["q"])
    assert bits(call["q"]) == bits(expected)


def split_lists(call, parts):
    """The call with each token's list cut into `parts` disjoint ones."""
    pieces = []
    for p in range(parts):
        lists = [call["kv_indices"][a:b][p::parts] for a, b in pairwise(call["kv_indptr"])]
        indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        pieces.append({**call, "kv_indices": np.concatenate(lists), "kv_indptr": indptr})
    return pieces


@pytest.mark.parametrize("q_dtype", [BF16, FP16])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("with_sink", [False, True])
def test_merge_of_parts_is_the_whole(q_dtype, parts, with_sink):
    call = base(q_dtype=q_dtype, lengths=[20, 1, 0, 6])
    sink = np.array([0.3, 3, -math.inf], F32) if with_sink else None
    rows = oracle.dequantized(call["unified_kv"], call["kv_scales"])
    exact, exact_lse = oracle.attention(call["q"], rows, call["kv_indices"], call["kv_indptr"], sink)
    states = [paged_decode(**piece, return_lse=True) for piece in split_lists(call, parts)]
    out, lse = merge_states([s[0] for s in states], [s[1] for s in states], sink)
    assert out.dtype == q_dtype
    # Rounded twice: the parts and the result.
    oracle.compare(out, exact, 2 * TOLERANCE[out.dtype.name])
    oracle.compare(lse, exact_lse, 4 * TOLERANCE["float32"])
    assert_empty(out[2], lse[2])


def test_merge_in_float32_and_by_hand():
    rng = np.random.default_rng(3)
    outs = rng.standard_normal((3, 4, 2, 64)).astype(F32)
    lses = (rng.standard_normal((3, 4, 2)) * 5).astype(F32)
    lses[1, 2], lses[:, 3] = -math.inf, -math.inf
    outs[1, 2] = math.nan  # of an empty part: not read
    sink = np.array([1.0, math.inf], F32)
    out, lse = merge_states(list(outs), list(lses), sink)
    weights = np.exp(lses.astype(np.float64))
    clean = np.where(np.isnan(outs), 0, outs).astype(np.float64)
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        expected = (weights[..., None] * clean).sum(0) / (total + np.exp(sink.astype(np.float64)))[..., None]
        oracle.compare(lse, np.log(total), TOLERANCE["float32"])
    oracle.compare(out, expected, TOLERANCE["float32"])
    assert not out[:, 1].any()
    assert_empty(out[3], lse[3])


def test_merge_of_one_part_is_that_part():
    out, lse = paged_decode(**base(), return_lse=True)
    merged, merged_lse = merge_states([out], [lse])
    assert bits(merged) == bits(out)
    assert bits(merged_lse) == bits(lse)


def test_merge_does_not_overflow():
    outs = [np.full((1, 1, 64), v, F32) for v in (3e38, 3.4e38)]
    lses = [np.full((1, 1), 3e38, F32)] * 2
    out, lse = merge_states(outs, lses)
    np.testing.assert_allclose(out, 3.2e38, rtol=1e-6)
    np.testing.assert_array_equal(lse, F32(3e38))


def test_merge_nan_stays_in_its_head():
    outs = np.ones((2, 2, 3, 64), F32)
    lses = np.zeros((2, 2, 3), F32)
    lses[1, 0, 2] = math.nan
    outs[0, 1, 1, 5] = math.inf
    out, lse = merge_states(list(outs), list(lses))
    bad = np.zeros(out.shape, bool)
    bad[0, 2] = True
    bad[1, 1, 5] = True
    np.testing.assert_array_equal(~np.isfinite(out), bad)
    np.testing.assert_array_equal(np.isnan(lse), [[False, False, True], [False] * 3])


def test_compare_can_fail():
    """The measure itself: a wrong number, a NaN too many, an infinity of the other sign."""
    a = np.ones((2, 3))
    assert oracle.compare(a, a, 0) == 0
    with pytest.raises(AssertionError, match=r"relative error .* worst at \(1, 2\)"):
        oracle.compare(a + np.array([[0, 0, 0], [0, 0, 0.1]]), a, 1e-3)
    with pytest.raises(AssertionError, match=r"NaN in other places.*first at \(0, 1\)"):
        oracle.compare(np.array([1.0, math.nan])[None], np.ones((1, 2)), 1)
    with pytest.raises(AssertionError, match=r"\+inf in other places"):
        oracle.compare(np.array([math.inf]), np.array([-math.inf]), 1)
    with pytest.raises(AssertionError, match="shape"):
        oracle.compare(a, a[:1], 1)
