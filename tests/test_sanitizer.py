"""The matrix of sanitize.py under each tool of compute-sanitizer, its outcome in the GPU record."""

from __future__ import annotations

import shutil

import pytest
import sanitize


@pytest.mark.gpu
@pytest.mark.slow  # a minute or more each
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_clean(tool, record_gpu):
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    record_gpu(f"sanitizer {tool}", sanitize.sanitize(tool))
