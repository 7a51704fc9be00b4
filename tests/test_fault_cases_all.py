"""Every public fault case has a test that is named after it."""

from __future__ import annotations

import trust


def test_every_case_has_a_test():
    assert set(trust.CASES) == set(range(1, 39))
    assert set(trust.named()) == set(trust.CASES)


def test_the_page_shows_outcomes():
    record = {"written": "2026-12-01T00:00:00", "gpu": {"device": "H200"}, "tests": {}}
    name = "tests/test_fault_cases_lists.py::test_o01_no_lists_at_all[cuda]"
    record["tests"] = {name: "passed", name.replace("[cuda]", "_b[cuda]"): "failed"}
    record["sanitizer memcheck"] = {"command": "c", "summary": "ERROR SUMMARY: 0 errors", "matrix": "{}", "seconds": 9}
    text = trust.page(record)
    row = next(line for line in text.splitlines() if line.startswith("| O01 "))
    assert row.endswith("| 1 passed |")
    assert "0 errors" in text
