"""The matrix of sanitize.py under each tool of compute-sanitizer, its outcome in the GPU record."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import sanitize


@pytest.mark.gpu
@pytest.mark.slow  # a minute or more each
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_clean(tool, record_gpu):
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    outcome = sanitize.sanitize(tool)
    record_gpu(f"sanitizer {tool}", outcome)
    assert outcome["clean"], f"{outcome['summary']}\n{outcome.get('output')}"


FAKE = """#!{python}
import sys, time
print("    0.1 s: decode 1", flush=True)
{what}
"""


@pytest.mark.parametrize(
    ("what", "summary", "clean"),
    [
        ("print('matrix: {1}'); print('========= ERROR SUMMARY: 0 errors')", "ERROR SUMMARY: 0 errors", True),
        (
            "print('matrix: {1}'); print('========= ERROR SUMMARY: 2 errors'); sys.exit(9)",
            "ERROR SUMMARY: 2 errors",
            False,
        ),
        ("print('========= ERROR SUMMARY: 0 errors')", "ERROR SUMMARY: 0 errors", False),  # the matrix did not end
        ("time.sleep(60)", "stopped after 3 s, 1 steps done", False),
        ("sys.exit(1)", "no summary", False),
    ],
    ids=["clean", "errors", "half the matrix", "hangs", "dies"],
)
def test_every_outcome_is_told(tmp_path, monkeypatch, what, summary, clean):
    """With a stand-in for compute-sanitizer and for the matrix: what it prints becomes the outcome, within the limit."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE.format(python=sys.executable, what=what))
    tool.chmod(0o755)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "sanitize.py").write_text("print('matrix: {}')")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "ROOT", tmp_path)
    outcome = sanitize.sanitize("synccheck", limit=3)
    assert outcome["summary"] == summary
    assert outcome["clean"] is clean
    assert ("output" in outcome) is not clean
    assert outcome["seconds"] < 10
