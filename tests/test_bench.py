"""The benchmark's arithmetic and tables; no GPU needed."""

from __future__ import annotations

import pytest

from cupy_paged import bench

H200 = bench.Ceilings(copy_gbs=4282, matmul_tflops=788)


@pytest.mark.parametrize(
    ("case", "floor", "bound"),
    [  # as published for this GPU
        ((128, 128, 2176), 92.7, "tensor"),
        ((64, 512, 2176), 185.3, "tensor"),
        ((64, 128, 640), 15.9, "memory"),
        ((32, 128, 2176), 41.5, "memory"),
        ((16, 128, 2176), 40.4, "memory"),
        ((16, 512, 2176), 161.6, "memory"),
        ((128, 1, 65536), 21.8, "tensor"),
    ],
)
def test_floors(case, floor, bound):
    least, what = bench.floor_us(bench.Case(*case), H200)
    assert least == pytest.approx(floor, abs=0.06)
    assert what == bound


def test_full_preset_is_the_whole_table():
    assert len(bench.PRESETS["full"]) == 65
    assert len(set(bench.PRESETS["full"])) == 65
    assert set(bench.PEER_US) == {c for c in bench.PRESETS["full"] if c.num_heads != 8}


def test_markdown_has_a_line_for_each_row():
    row = bench.Row(16, 1, 640, 6.5, 6.4, 6.7, 3.2, 54.0, 0.1, "memory", 1.4, 14.0, 1.7e-3, 8.2)
    record = {
        "gpu": {"device": "GPU"},
        "ceilings": bench.asdict(H200),
        "rows": [bench.asdict(row), bench.asdict(row)],
    }
    lines = bench.markdown(record).splitlines()
    assert lines[0] == "GPU: copy 4282 GB/s, bf16 matmul 788 TFLOP/s, in the same run"
    assert lines[4] == lines[5]
    assert lines[4].startswith("| 16 | 1 | 640 | 6.5 | 6.4-6.7 |")


def test_without_a_gpu_it_times_numpy_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(bench, "gpu_missing", lambda: "no CUDA GPU")
    assert bench.main(["--shape", "2,3,10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "NumPy backend" in lines[0]
    assert lines[-1].startswith("| 2 | 3 | 10 |")
