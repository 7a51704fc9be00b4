"""Argument validation: every case of the error table, what its message says, and the order of the checks.

Arrays on GPUs are stood in for by descriptions of them (`on_gpu`), which is all that checks look at.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cupy_paged import arrays, checks, merge_states, paged_decode, warmup, workspace_size

BF16, F32 = ml_dtypes.bfloat16, np.float32
T, H, D, PAGES = 3, 2, 128, 10


def fp8_call(page_size=1, group_size=64, **changes):
    shape = (PAGES, D) if page_size == 1 else (PAGES, page_size, D)
    call = {
        "q": np.ones((T, H, D), BF16),
        "unified_kv": np.zeros(shape, np.uint8),
        "kv_indices": np.arange(6, dtype=np.int32),
        "kv_indptr": np.array([0, 2, 4, 6], np.int32),
        "kv_scales": np.ones((PAGES, D // group_size), F32),
        "group_size": group_size,
    }
    return call | changes


def bf16_call(**changes):
    call = fp8_call(unified_kv=np.zeros((PAGES, D), BF16))
    del call["kv_scales"], call["group_size"]
    return call | changes


def fails(error, call, *words):
    """The call raises exactly `error`, with every word in the message, and writes nothing."""
    out = call.get("out")
    before = out.tobytes() if isinstance(out, np.ndarray) else None
    with pytest.raises(error) as caught:
        paged_decode(**call)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
    if before is not None:
        assert out.tobytes() == before
    return str(caught.value)


def on_gpu(a, device=0, kind="cupy"):
    return arrays.Array(None, kind, 0x1000, a.shape, a.strides, arrays.dtype_name(a.dtype), device, True)


def test_good_calls_pass():
    assert paged_decode(**fp8_call()).shape == (T, H, D)
    assert paged_decode(**fp8_call(page_size=4)).dtype == BF16
    assert paged_decode(**bf16_call(), return_lse=True)[1].shape == (T, H)
    assert paged_decode(**fp8_call(unified_kv=np.zeros((PAGES, D), ml_dtypes.float8_e4m3fn))).dtype == BF16


# ---- presence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "unified_kv", "kv_indices", "kv_indptr"])
def test_missing_argument(name):
    fails(TypeError, fp8_call(**{name: None}), name, "missing")


@pytest.mark.parametrize("name", ["q", "unified_kv", "kv_indices", "kv_indptr", "attn_sink", "kv_scales", "out"])
@pytest.mark.parametrize("value", [[1, 2], 3.0, "text", F32(1)])
def test_not_an_array(name, value):
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    fails(
        TypeError,
        fp8_call(**{name: value}),
        f"{name} must be a NumPy, CuPy, JAX or Numba array, a CUDA torch tensor, or an object with __dlpack__",
        kind,
    )


# ---- device ---------------------------------------------------------------------------------------------------


class FakeTensor:
    """What `arrays` asks a torch tensor."""

    def __init__(self, device, requires_grad=False, negated=False):
        self.negated = negated
        self.device = type("device", (), {"type": device, "index": 0, "__str__": lambda self: device})()
        self.shape, self.dtype, self.requires_grad = (T, H, D), "torch.bfloat16", requires_grad

    def element_size(self):
        return 2

    def data_ptr(self):
        return 0x1000

    def stride(self):
        return (H * D, D, 1)

    def is_neg(self):
        return self.negated


FakeTensor.__module__ = "torch"


def test_tensor_on_the_cpu():
    recipe = "q.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)"  # torch's numpy() refuses bfloat16
    fails(TypeError, fp8_call(q=FakeTensor("cpu")), "q is a torch tensor on 'cpu'", "q.cuda()", recipe)


def test_tensor_that_requires_grad():
    fails(TypeError, fp8_call(q=FakeTensor("cuda", requires_grad=True)), "q requires grad", "q.detach()")


def test_tensor_whose_signs_are_not_in_memory():
    fails(TypeError, fp8_call(q=FakeTensor("cuda", negated=True)), "q is a view of a conjugate", "q.resolve_neg()")


def test_torch_tensor_is_described():
    a = arrays.view("q", FakeTensor("cuda"))
    assert (a.kind, a.dtype, a.device, a.shape, a.strides) == ("torch", "bfloat16", 0, (T, H, D), (512, 256, 2))


def check_decode(**changes):
    """The checks of paged_decode over descriptions."""
    call = {name: arrays.view(name, a) for name, a in fp8_call().items() if name != "group_size"}
    call = {name: on_gpu(a.obj) for name, a in call.items()} | {"attn_sink": None, "out": None} | changes
    order = ["q", "unified_kv", "kv_indices", "kv_indptr", "attn_sink", "kv_scales", "out"]
    return checks.decode(*(call[name] for name in order), 64, 0, False)


@pytest.mark.parametrize("name", ["unified_kv", "kv_indices", "kv_indptr", "attn_sink", "kv_scales", "out"])
def test_numpy_mixed_with_cupy(name):
    host = {
        **{n: a for n, a in fp8_call().items() if n != "group_size"},
        "attn_sink": np.zeros(H, F32),
        "out": np.zeros((T, H, D), BF16),
    }
    with pytest.raises(TypeError) as caught:
        check_decode(**{name: arrays.view(name, host[name])})
    for words in (f"{name} is in host memory (NumPy)", "q is on CUDA device 0", f"cupy.asarray({name})", "q.get()"):
        assert words in str(caught.value)


def test_cupy_mixed_into_numpy():
    with pytest.raises(TypeError, match=r"unified_kv is on CUDA device 0 but q is in host memory.*cupy\.asarray\(q\)"):
        check_decode(
            q=arrays.view("q", np.ones((T, H, D), BF16)),
        )


@pytest.mark.parametrize("name", ["kv_indptr", "kv_scales"])
def test_two_gpus(name):
    with pytest.raises(ValueError, match=rf"{name} is on CUDA device 1 but q is on CUDA device 0"):
        check_decode(**{name: on_gpu(fp8_call()[name], device=1)})


# ---- dtype ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, ml_dtypes.float8_e4m3fn])
def test_q_dtype(dtype):
    fails(TypeError, fp8_call(q=np.ones((T, H, D), dtype)), "q must be bfloat16 or float16", np.dtype(dtype).name)


@pytest.mark.parametrize(
    "dtype", [BF16, np.float16, np.float32, np.int8, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz]
)
def test_scales_with_a_pool_that_is_not_e4m3fn(dtype):
    fails(
        TypeError, fp8_call(unified_kv=np.zeros((PAGES, D), dtype)), "unified_kv", "float8_e4m3fn", np.dtype(dtype).name
    )


@pytest.mark.parametrize("with_scales", [True, False])
@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"])
def test_other_fp8_formats_are_refused(name, with_scales):
    call = fp8_call(unified_kv=np.zeros((PAGES, D), getattr(ml_dtypes, name)))
    if not with_scales:
        call["kv_scales"] = None
    fails(TypeError, call, "unified_kv must be float8_e4m3fn", f"got {name}", "do not reinterpret the bytes")


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e4m3fn])
def test_fp8_pool_without_scales(dtype):
    call = fp8_call(unified_kv=np.zeros((PAGES, D), dtype), kv_scales=None)
    fails(ValueError, call, "kv_scales is missing", "never assumed to be 1.0", np.dtype(dtype).name, "quantize_kv")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BF16, np.uint8])
def test_scales_dtype(dtype):
    scales = np.ones((PAGES, 2), dtype)
    fails(TypeError, fp8_call(kv_scales=scales), "kv_scales must be float32", f"got {np.dtype(dtype).name}")


@pytest.mark.parametrize(("q", "pool"), [(BF16, np.float16), (np.float16, BF16), (BF16, np.float32)])
def test_pool_dtype_without_scales(q, pool):
    call = bf16_call(q=np.ones((T, H, D), q), unified_kv=np.zeros((PAGES, D), pool))
    fails(TypeError, call, f"q is {np.dtype(q).name}", f"unified_kv is {np.dtype(pool).name}", "without kv_scales")


@pytest.mark.parametrize("name", ["kv_indices", "kv_indptr"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16, np.float32])
def test_index_dtype(name, dtype):
    message = fails(
        TypeError, fp8_call(**{name: fp8_call()[name].astype(dtype)}), f"{name} must be int32", np.dtype(dtype).name
    )
    assert (f"{name}.astype('int32')" in message) == (dtype != np.float32)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float64])
def test_sink_dtype(dtype):
    fails(TypeError, fp8_call(attn_sink=np.zeros(H, dtype)), "attn_sink must be float32", np.dtype(dtype).name)


def test_out_dtype():
    fails(TypeError, fp8_call(out=np.zeros((T, H, D), F32)), "out must be bfloat16", "float32")


# ---- layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "unified_kv", "kv_scales", "out"])
def test_last_axis_must_be_contiguous(name):
    call = fp8_call(out=np.zeros((T, H, D), BF16))
    a = np.repeat(call[name], 2, axis=-1)[..., ::2]
    assert a.shape == call[name].shape
    call[name] = a
    fails(ValueError, call, f"last axis of {name} must be contiguous", str(a.strides))


@pytest.mark.parametrize("shape", [(T, D), (T, 1, H, D), (D,)])
def test_q_axes(shape):
    fails(ValueError, fp8_call(q=np.ones(shape, BF16)), "q must have shape (T, H, D)", str(shape))


@pytest.mark.parametrize("shape", [(D,), (PAGES, 1, 1, D)])
def test_pool_axes(shape):
    call = fp8_call(unified_kv=np.zeros(shape, np.uint8))
    fails(ValueError, call, "unified_kv must have shape (num_pages, D) or (num_pages, page_size, D)", str(shape))


def test_pages_without_slots():
    fails(
        ValueError,
        fp8_call(unified_kv=np.zeros((PAGES, 0, D), np.uint8)),
        "unified_kv",
        "at least one slot",
        "(10, 0, 128)",
    )


def test_read_only_out():
    out = np.zeros((T, H, D), BF16)
    out.flags.writeable = False
    fails(ValueError, fp8_call(out=out), "out is read-only")


def test_out_with_overlapping_elements():
    out = np.lib.stride_tricks.as_strided(np.zeros((H, D), BF16), (T, H, D), (0, 2 * D, 2))
    fails(ValueError, fp8_call(out=out), "out has overlapping elements", str(out.strides))


def test_empty_arrays_have_no_strides_to_check():
    call = bf16_call(q=np.ones((0, H, D)).astype(BF16), kv_indptr=np.zeros(1, np.int32))
    assert paged_decode(**call, out=np.ones((0, H, D)).astype(BF16)).shape == (0, H, D)


# ---- shape ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 96, 576, 1024, 0])
def test_head_dim(head_dim):
    call = bf16_call(q=np.ones((T, H, head_dim), BF16), unified_kv=np.zeros((PAGES, head_dim), BF16))
    fails(ValueError, call, "multiple of 64 from 64 to 512", f"got {head_dim}")


def test_no_heads():
    fails(ValueError, fp8_call(q=np.ones((T, 0, D), BF16)), "at least one head", "(3, 0, 128)")


def test_head_dims_differ():
    call = fp8_call(unified_kv=np.zeros((PAGES, 256), np.uint8))
    fails(ValueError, call, "q and unified_kv must have the same head dimension", "128 and 256")


def test_group_size_must_divide():
    call = fp8_call(group_size=128, q=np.ones((T, H, 192), BF16), unified_kv=np.zeros((PAGES, 192), np.uint8))
    fails(ValueError, call, "D = 192", "group_size = 128")


@pytest.mark.parametrize("value", [16, 1])
def test_group_size_must_be_supported(value):
    fails(ValueError, fp8_call() | {"group_size": value}, "group_size must be one of (32, 64, 128)", f"got {value}")


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-64, ValueError), ("64", TypeError), (True, TypeError)])
def test_group_size_kind(value, error):
    fails(error, fp8_call() | {"group_size": value}, "group_size")


LIKE = [
    # shape of kv_scales, page_size, what it looks like
    ((7, 2), 1, ["the pool grew without its scales (7 rows of scales for 10 pages)", "PagedKV.grow"]),
    ((0, 2), 1, ["the pool grew without its scales"]),
    ((40, 2), 4, ["one row of scales per slot (10 pages of 4 slots)"]),
    ((10, 4, 2), 4, ["one row of scales per slot"]),
    ((20,), 1, ["a flat vector of the right size", "kv_scales.reshape(10, 2)"]),
    ((2, 10), 1, ["the transposed array", "kv_scales.T"]),
    ((10, 8), 1, ["8 groups a row, as for a head dimension of 512", "group_size of 16"]),
    ((10, 4), 1, ["4 groups a row, as for a head dimension of 256", "group_size of 32"]),
    ((10, 1), 1, ["one scale per row (per-token quantisation)"]),
    ((12, 2), 1, ["scales of a larger pool (12 pages)"]),
    ((3, 5), 1, ["scales of another pool"]),
    ((7,), 1, ["scales of another pool"]),
    ((10, 2, 1), 1, ["scales of another pool"]),
    ((), 1, ["scales of another pool"]),
]


@pytest.mark.parametrize(("shape", "page_size", "words"), LIKE)
def test_scales_shape_says_what_it_looks_like(shape, page_size, words):
    call = fp8_call(page_size=page_size, kv_scales=np.ones(shape, F32))
    both = ["kv_scales must have shape (num_pages, D // group_size) = (10, 2)", f"got {shape}", "10 pages", "D = 128"]
    fails(ValueError, call, *both, "group_size = 64", *words)


@pytest.mark.parametrize("length", [0, 3, 5, 1])
def test_indptr_length(length):
    call = fp8_call(kv_indptr=np.zeros(length, np.int32))
    fails(ValueError, call, "kv_indptr must have shape (T + 1,) = (4,)", "3 tokens", f"got ({length},)")


def test_index_axes():
    fails(ValueError, fp8_call(kv_indices=np.zeros((3, 2), np.int32)), "kv_indices must have shape (nnz,)", "(3, 2)")
    fails(ValueError, fp8_call(kv_indptr=np.zeros((4, 1), np.int32)), "kv_indptr must have shape", "(4, 1)")


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), ()])
def test_sink_length(shape):
    call = fp8_call(attn_sink=np.zeros(shape, F32))
    fails(ValueError, call, "attn_sink must have shape (H,) = (2,)", f"got {shape}")


@pytest.mark.parametrize("shape", [(T, H + 1, D), (T + 1, H, D), (T, H, 64)])
def test_out_shape(shape):
    fails(ValueError, fp8_call(out=np.zeros(shape, BF16)), "out must have q's shape (3, 2, 128)", str(shape))


def test_more_entries_than_int32_offsets_reach():
    many = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**31,), (0,))
    fails(ValueError, fp8_call(kv_indices=many), "kv_indices", "2**31", str(2**31))


# ---- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", True, 1j, np.ones(1)])
def test_softmax_scale_kind(value):
    fails(TypeError, fp8_call(softmax_scale=value), "softmax_scale must be a Python or NumPy float")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_softmax_scale_must_be_finite(value):
    fails(ValueError, fp8_call(softmax_scale=value), "softmax_scale must be finite", str(value))


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("2", TypeError)])
def test_num_splits(value, error):
    fails(error, fp8_call(num_splits=value), "num_splits")


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_batch_invariant(value):
    fails(TypeError, fp8_call(batch_invariant=value), "batch_invariant must be True or False", repr(value))


# ---- order ----------------------------------------------------------------------------------------------------

# One fault for each stage, none of which another stage would notice.
STAGES = [
    ("presence", {"kv_indptr": None}, "kv_indptr is missing"),
    ("device", {"q": FakeTensor("cpu")}, "torch tensor on 'cpu'"),
    ("dtype", {"kv_indices": np.arange(6, dtype=np.int64)}, "kv_indices must be int32"),
    ("layout", {"unified_kv": np.zeros((PAGES, 2 * D), np.uint8)[:, ::2]}, "last axis of unified_kv"),
    ("shape", {"kv_scales": np.ones((7, 2), F32)}, "grew without its scales"),
]


@pytest.mark.parametrize("first", range(len(STAGES)))
def test_order_of_checks(first):
    """With faults in several stages, the earliest speaks."""
    changes = {}
    for _, change, _ in STAGES[first:]:
        changes |= change
    error = TypeError if first < 3 else ValueError
    fails(error, fp8_call(**changes), STAGES[first][2])


def test_devices_are_checked_before_dtypes():
    with pytest.raises(TypeError, match="kv_indices is in host memory"):
        check_decode(kv_indices=arrays.view("kv_indices", np.arange(6)))


def test_a_fault_is_found_after_a_good_call_of_the_same_shapes():
    """Layouts that passed are remembered; another layout is not taken for one of them."""
    good = fp8_call(out=np.zeros((T, H, D), BF16))
    paged_decode(**good)
    read_only = np.zeros((T, H, D), BF16)
    read_only.flags.writeable = False
    fails(ValueError, good | {"out": read_only}, "read-only")
    fails(ValueError, good | {"kv_scales": None}, "kv_scales is missing")
    fails(ValueError, good | {"group_size": 32}, "kv_scales must have shape", "(10, 4)")
    paged_decode(**good)


# ---- validate=True --------------------------------------------------------------------------------------------


def validated(**changes):
    return fp8_call(validate=True, out=np.ones((T, H, D), BF16), **changes)


def test_validate_accepts_a_good_call():
    assert paged_decode(**validated()).shape == (T, H, D)
    unused = np.array([0, 1, 2, 3, 4, 5, -1, 99], np.int32)  # entries beyond the lists are nobody's
    assert paged_decode(**validated(kv_indices=unused)).shape == (T, H, D)
    assert paged_decode(**validated(kv_indices=np.arange(6, dtype=np.int32) + 34, page_size=4)).shape == (T, H, D)


@pytest.mark.parametrize(("page_size", "slot"), [(1, 10), (1, -1), (1, 2**31 - 1), (4, 40), (4, -(2**31))])
def test_validate_names_the_first_bad_slot(page_size, slot):
    indices = np.array([0, 1, 2, slot, -5, 0], np.int32)
    slots = f"{PAGES * page_size} slots"
    call = validated(kv_indices=indices, page_size=page_size)
    fails(IndexError, call, f"kv_indices[3] = {slot}", "token 1, position 1", slots)


def test_validate_names_the_token_beyond_empty_rows():
    call = validated(kv_indices=np.array([0, 77], np.int32), kv_indptr=np.array([0, 1, 1, 2], np.int32))
    fails(IndexError, call, "kv_indices[1] = 77", "token 2, position 0")


@pytest.mark.parametrize(
    ("indptr", "words"),
    [
        ([-1, 2, 4, 6], ["kv_indptr[0] = -1", "[0, 6]"]),
        ([7, 7, 7, 7], ["kv_indptr[0] = 7"]),
        ([0, 4, 2, 6], ["must not decrease", "kv_indptr[1] = 4, kv_indptr[2] = 2"]),
        ([0, 2, 8, 9], ["kv_indptr[2] = 8", "6 entries"]),
        ([0, 2**31 - 1, -(2**31), 6], ["must not decrease", "kv_indptr[1] = 2147483647"]),
    ],
)
def test_validate_indptr(indptr, words):
    fails(ValueError, validated(kv_indptr=np.array(indptr, np.int32)), *words)


def test_without_validate_bad_entries_are_harmless():
    indices = np.array([0, 99, -1, 3, 2**31 - 1, 5], np.int32)
    out = paged_decode(**fp8_call(kv_indices=indices, kv_indptr=np.array([5, -3, 900, 2], np.int32)))
    assert np.isfinite(out.astype(F32)).all()


# ---- workspace, merge_states, warmup ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workspace", "error", "words"),
    [
        (np.zeros(256, np.float32), TypeError, "workspace must be uint8"),
        (np.zeros((2, 256), np.uint8), ValueError, "one contiguous axis of bytes"),
        (np.zeros(512, np.uint8)[::2], ValueError, "one contiguous axis of bytes"),
    ],
)
def test_workspace(workspace, error, words):
    with pytest.raises(error, match=words):
        checks.workspace(on_gpu(workspace), on_gpu(np.ones((T, H, D), BF16)))


def test_workspace_elsewhere():
    q = on_gpu(np.ones((T, H, D), BF16))
    with pytest.raises(TypeError, match="workspace is in host memory"):
        checks.workspace(arrays.view("workspace", np.zeros(256, np.uint8)), q)
    with pytest.raises(ValueError, match="workspace is on CUDA device 1"):
        checks.workspace(on_gpu(np.zeros(256, np.uint8), device=1), q)


def states(n=2, dtype=BF16):
    return [np.ones((T, H, D), dtype)] * n, [np.zeros((T, H), F32)] * n


MERGE = [
    (lambda o, e: ([], []), ValueError, "at least one"),
    (lambda o, e: (o, e[:1]), ValueError, "equally many, got 2 and 1"),
    (lambda o, e: ([o[0], o[1].astype(F32)], e), TypeError, "outs[1] must be bfloat16, got float32"),
    (lambda o, e: ([a.astype(np.float64) for a in o], e), TypeError, "outs[0] must be bfloat16 or float16 or float32"),
    (lambda o, e: (o, [e[0], e[1].astype(np.float64)]), TypeError, "lses[1] must be float32, got float64"),
    (
        lambda o, e: ([o[0], o[1][:2]], e),
        ValueError,
        "outs[1] must have the shape of outs[0], (3, 2, 128), got (2, 2, 128)",
    ),
    (lambda o, e: (o, [e[0], e[1].T]), ValueError, "lses[1] must have shape (T, H) = (3, 2), got (2, 3)"),
    (lambda o, e: ([a[0] for a in o], e), ValueError, "outs[0] must have shape (T, H, D)"),
    (lambda o, e: ([o[0], o[1][..., ::-1]], e), ValueError, "last axis of outs[1]"),
    (lambda o, e: ([o[0], None], e), TypeError, "outs[1] must be a NumPy, CuPy, JAX or Numba array"),
]


@pytest.mark.parametrize(("change", "error", "words"), MERGE)
def test_merge_states(change, error, words):
    with pytest.raises(error) as caught:
        merge_states(*change(*states()))
    assert words in str(caught.value)


def test_merge_states_sink():
    with pytest.raises(TypeError, match="attn_sink must be float32"):
        merge_states(*states(), np.zeros(H))
    with pytest.raises(ValueError, match=r"attn_sink must have shape \(H,\) = \(2,\), got \(3,\)"):
        merge_states(*states(), np.zeros(3, F32))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1"),
        ({"head_dim": 100}, ValueError, "multiple of 64"),
        ({"nnz": 2.0}, TypeError, "nnz must be an int"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1"),
        ({"group_size": 96}, ValueError, "group_size"),
        ({"num_splits": 0}, ValueError, "num_splits"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant"),
    ],
)
@pytest.mark.parametrize("function", [warmup, workspace_size])
def test_shapes_given_as_numbers(function, changes, error, words):
    numbers = {"num_tokens": 1, "num_heads": 8, "head_dim": 512, "nnz": 100} | changes
    with pytest.raises(error, match=words):
        function(**numbers)
