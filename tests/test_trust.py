"""The page of evidence, written from a record made up here: every part of a record must reach it."""

from __future__ import annotations

import json

import pytest
import trust

RECORD = {
    "written": "2026-12-07T10:00:00+00:00",
    "gpu": {"device": "Test GPU"},
    "tests": {
        "tests/test_fault_cases_lists.py::test_o01_empty_rows[cuda]": "passed",
    },
    "fuzzer": {"cases": 321, "kinds": {"lists": 321}, "failures": ["python tests/fuzz.py --seed 7"]},
    "sanitizer memcheck": {
        "command": "compute-sanitizer --tool memcheck", "summary": "ERROR SUMMARY: 0 errors", "matrix": "{'decode': 21}",
        "seconds": 30, "clean": True,
    },
    "sanitizer initcheck": {
        "command": "compute-sanitizer --tool initcheck", "summary": "stopped after 240 s, 3 steps done",
        "matrix": "3 steps, the last: decode 3", "seconds": 240, "clean": False, "output": "...",
    },
    "errors: q bfloat16, pool fp8, H=16, bound 0.0025": {
        "D=512 L=1000000 normal": {"call": 1.6e-3, "row": 1.9e-3, "lse": 1e-6},
    },
}  # fmt: skip


def test_every_case_has_a_title_and_tests():
    assert sorted(trust.CASES) == list(range(1, 39))
    assert sorted(trust.named()) == sorted(trust.CASES)


def test_every_part_of_a_record_is_told():
    names = trust.named()
    tests = {f"tests/{file}::{name}[cuda]": "passed" for of in names.values() for file, name in of}
    file, name = names[17][0]
    tests[f"tests/{file}::{name}[cuda]"] = "failed"
    text = trust.page(RECORD | {"tests": tests})
    rows = [line for line in text.splitlines() if line.startswith("| O")]
    assert len(rows) == 38
    assert all("passed" in row or "failed" in row for row in rows)
    assert [row for row in rows if "failed" in row] == [row for row in rows if row.startswith("| O17")]
    for part in (
        "2026-12-07", "Test GPU", "321 cases, 1 failures", "--seed 7", "ERROR SUMMARY: 0 errors",
        "stopped after 240 s, 3 steps done", "| D=512 L=1000000 normal | 0.0016 | 0.0019 | 1e-06 |", "bound 0.0025",
    ):  # fmt: skip
        assert part in text, part


def test_it_says_what_a_record_lacks():
    text = trust.page({name: RECORD[name] for name in ("written", "gpu", "tests")})
    assert text.count("not in this record") == 3
    assert "needs no GPU" in text


def test_the_command_prints_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trust, "RECORD", tmp_path / "gpu_record.json")
    with pytest.raises(SystemExit, match="no GPU run has been recorded"):
        trust.main()
    trust.RECORD.write_text(json.dumps(RECORD))
    trust.main()
    assert capsys.readouterr().out == trust.page(RECORD)


def test_the_page_is_of_the_record_and_the_readme_links_to_it():
    page = trust.TESTS / "TRUST.md"
    if not page.exists():
        pytest.skip("no page of evidence yet: it is written from the GPU record")
    assert page.read_text() == trust.page(json.loads(trust.RECORD.read_text()))
    assert "tests/TRUST.md" in (trust.TESTS.parent / "README.md").read_text()
