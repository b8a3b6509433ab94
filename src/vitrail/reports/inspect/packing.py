"""Numbers that a page carries for its scripts, in few bytes."""

import base64
from typing import Any

import numpy as np


def pack(values: np.ndarray, *, bits: int = 8, scale: float | None = None) -> dict[str, Any]:
    """Signed numbers as integers of 8 or 16 bits, relative to `scale` (default: the largest absolute value). Values
    beyond it are cut; the script multiplies by `step` what it reads."""
    largest = max(float(np.abs(values).max(initial=0)), 1e-30) if scale is None else max(scale, 1e-30)
    most = 2 ** (bits - 1) - 1
    whole = np.round(np.clip(values / largest, -1, 1) * most).astype(f"<i{bits // 8}")
    return {"bits": bits, "step": float(f"{largest / most:.6g}"), "bytes": base64.b64encode(whole.tobytes()).decode()}


def rounded_to(values: np.ndarray, digits: int = 4) -> list[Any]:
    """Nested lists of numbers with so many significant digits."""
    if values.ndim > 1:
        return [rounded_to(row, digits) for row in values]
    return [float(f"{value:.{digits}g}") for value in values]
