"""Command line: ``python -m cupy_paged demo | bench | plot | doctor``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "attention of a real model from a paged FP8 pool, on the GPU or on NumPy",
    "bench": "times, bandwidth and distance from the hardware's limits, on the GPU",
    "plot": "pictures of a benchmark record, as SVG",
    "doctor": "what works on this machine, and why not",
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given else "--help"
    if command not in COMMANDS:
        asked = command in ("-h", "--help")
        stream = sys.stdout if asked else sys.stderr
        if not asked:
            print(f"unknown command {command!r}", file=stream)
        print("usage: python -m cupy_paged COMMAND [options]    (COMMAND --help lists its options)\n", file=stream)
        for name, text in COMMANDS.items():
            print(f"  {name:<8}{text}", file=stream)
        return 0 if asked else 2
    return int(importlib.import_module(f"cupy_paged.{command}").main(given[1:]))


if __name__ == "__main__":
    sys.exit(main())
