"""Plans and cuts: every slot is taken once, partials have places of their own, and combine finds all of them.

`Device` says in Python what kernels/schedule.cuh does, from the plan and the lengths alone.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_paged.backends.variants import choose
from cupy_paged.plan import Plan, Problem, make_plan


class Device:
    def __init__(self, plan: Plan, lengths: list[int], first: int = 0) -> None:
        self.plan = plan
        self.indptr = [first + int(n) for n in np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])]
        self.lengths = lengths
        self.length = max(self.pos(len(lengths)), 1)

    def pos(self, t: int) -> int:
        return self.indptr[t] - self.indptr[0] + self.plan.row_cost * t

    def quantum(self, n: int) -> int:
        plan = self.plan
        if plan.max_chunks == 0:
            return plan.tile
        chunks = min(max(-(-n // plan.chunk_min), 1), plan.max_chunks)
        even = -(-n // chunks)
        return max(-(-even // plan.tile), 1) * plan.tile

    def cut(self, g: int) -> tuple[int, int]:
        if g >= self.plan.num_ctas:
            return len(self.lengths), 0
        x = self.length * g // self.plan.num_ctas
        row = max(t for t in range(len(self.lengths)) if self.pos(t) <= x)
        quantum = self.quantum(self.lengths[row])
        offset = (x - self.pos(row)) // quantum * quantum
        return (row + 1, 0) if offset and offset >= self.lengths[row] else (row, offset)

    def first_partial(self, t: int) -> int:
        by_row = t * self.plan.max_chunks
        return min(by_row, (self.indptr[t] - self.indptr[0]) // self.plan.chunk_min + t)

    def segments(self, g: int):
        """(row, offset, length, place of the partial or -1) of worker g."""
        (row, offset), end = self.cut(g), self.cut(g + 1)
        while (row, offset) < end:
            n = self.lengths[row]
            stop = min(end[1], n) if row == end[0] else n
            if self.plan.max_chunks:
                stop = min(stop, offset + self.quantum(n))
            if offset == 0 and stop == n:
                place = -1
            elif self.plan.max_chunks:
                place = self.first_partial(row) + offset // self.quantum(n)
            else:
                place = 2 * g + (offset == 0)
            yield row, offset, stop - offset, place
            row, offset = (row + 1, 0) if stop == n else (row, stop)

    def places(self, t: int) -> list[int]:
        """Where combine.cu looks for the partials of row t; empty or one: the row is written directly."""
        n, plan = self.lengths[t], self.plan
        if plan.max_chunks:
            count = -(-n // self.quantum(n))
            return [self.first_partial(t) + k for k in range(count)]
        if n == 0:
            return []
        extent = n + plan.row_cost
        begin = self._last_below(self.pos(t) + min(extent, plan.tile))
        end = self._last_below(self.pos(t) + min(extent, -(-n // plan.tile) * plan.tile))
        return [2 * g + (g == begin) for g in range(begin, end + 1)]

    def _last_below(self, x: int) -> int:
        g = -(-x * self.plan.num_ctas // self.length) - 1
        return min(max(g, 0), self.plan.num_ctas - 1)


def check(plan: Plan, lengths: list[int], first: int = 0) -> None:
    device = Device(plan, lengths, first)
    taken: list[list[tuple[int, int]]] = [[] for _ in lengths]
    direct = [0] * len(lengths)
    owner: dict[int, int] = {}
    idle = set()
    for g in range(plan.num_ctas):
        segments = list(device.segments(g))
        if not segments:
            idle.add(2 * g)  # an idle worker marks its first place empty
        for row, offset, length, place in segments:
            taken[row].append((offset, length))
            if place < 0:
                direct[row] += 1
            else:
                assert place < plan.num_partials
                assert place not in owner, "two partials in one place"
                owner[place] = row
    for t, n in enumerate(lengths):
        pieces = sorted(taken[t])
        assert sum(length for _, length in pieces) == n
        assert all(a + b == c for (a, b), (c, _) in itertools.pairwise(pieces))
        assert direct[t] == (len(pieces) == 1), "an undivided row is written once, directly"
        places, partials = device.places(t), {p for p, row in owner.items() if row == t}
        if direct[t]:
            assert len(places) < 2, "combine would overwrite a row that was written directly"
        else:
            assert partials <= set(places)
            # What combine reads beside the row's own partials has been marked empty in this launch.
            if not plan.max_chunks:
                assert set(places) - partials <= idle - set(owner)
            else:
                assert partials == set(places)


def problem(lengths, heads=16, head_dim=512, **options) -> Problem:
    options = {"num_splits": 0, "batch_invariant": False, "spare": 0} | options
    nnz = int(sum(lengths)) + options["spare"]
    return Problem(
        len(lengths), heads, head_dim, nnz, 1, "bfloat16", "float8_e4m3fn", 64, options["num_splits"],
        options["batch_invariant"],
    )  # fmt: skip


lengths_of_calls = st.lists(
    st.one_of(st.integers(0, 70), st.integers(0, 700), st.integers(0, 9000)), min_size=1, max_size=40
)


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths_of_calls,
    slots=st.integers(1, 400),
    tile=st.sampled_from([8, 32, 64]),
    row_cost=st.sampled_from([0, 8, 32, 64]),
    splits=st.sampled_from([0, 0, 0, 1, 2, 7, 64]),
    invariant=st.booleans(),
    spare=st.sampled_from([0, 1, 5000]),
)
def test_every_slot_is_taken_once(lengths, slots, tile, row_cost, splits, invariant, spare):
    """Also where the list's buffer is longer than the lists (a captured graph replayed with short ones)."""
    call = problem(lengths, num_splits=splits, batch_invariant=invariant, spare=spare)
    plan = make_plan(call, tile=tile, row_cost=row_cost, slots=slots, chunk_min=8 * tile, max_chunks=16)
    check(plan, lengths, first=spare)


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"num_splits": 3}])
@pytest.mark.parametrize(
    "lengths", [[640], [65536], [2176] * 32, [2176] * 128, [1] * 300, [0, 5, 0, 0], [16384] + [128] * 63]
)
def test_chosen_plans(heads, options, lengths):
    _, plan = choose(problem(lengths, heads, **options), 90, 132, (16, 16))
    check(plan, lengths)


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"num_splits": 5}])
@pytest.mark.parametrize("length", [1, 33, 640, 2176, 40000])
def test_fixed_splits_do_not_depend_on_the_batch(length, options):
    """A row is divided the same way alone, in a batch, and at any position."""

    def pieces(lengths, t):
        _, plan = choose(problem(lengths, **options), 90, 132, (16, 16))
        device = Device(plan, lengths)
        found = [s[1:3] for g in range(plan.num_ctas) for s in device.segments(g) if s[0] == t]
        return sorted(found)

    alone = pieces([length], 0)
    assert pieces([7, length, 0, 900], 1) == alone
    assert pieces([2176] * 100 + [length], 100) == alone


def test_workspace_holds_the_partials():
    for lengths in ([2176] * 128, [65536], [3]):
        for heads in (1, 16, 128):
            call = problem(lengths, heads)
            _, plan = choose(call, 90, 132, (16, 16))
            assert plan.lse_offset >= plan.num_partials * heads * call.head_dim * 4
            assert plan.workspace_bytes >= plan.lse_offset + plan.num_partials * heads * 4
