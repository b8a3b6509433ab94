"""Compact encoding of numbers in a page. The page's scripts read them."""

import base64
from typing import Any

import numpy as np


def pack(values: np.ndarray, *, bits: int = 8, scale: float | None = None) -> dict[str, Any]:
    """Encode signed numbers as base64 integers of 8 or 16 bits. The script multiplies them by `step`.

    `scale` is the largest absolute value that can be represented (default: that of `values`). Larger ones are clipped.
    """
    largest = max(float(np.abs(values).max(initial=0)), 1e-30) if scale is None else max(scale, 1e-30)
    levels = 2 ** (bits - 1) - 1
    integers = np.round(np.clip(values / largest, -1, 1) * levels).astype(f"<i{bits // 8}")
    encoded = base64.b64encode(integers.tobytes()).decode()
    return {"bits": bits, "step": float(f"{largest / levels:.6g}"), "bytes": encoded}


def round_significant(values: np.ndarray, digits: int = 4) -> list[Any]:
    """Return numbers as nested lists, rounded to `digits` significant digits."""
    if values.ndim > 1:
        return [round_significant(row, digits) for row in values]
    return [float(f"{value:.{digits}g}") for value in values]
