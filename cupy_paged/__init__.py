"""Paged FP8 attention decode for CuPy, NumPy and everything that speaks DLPack."""
