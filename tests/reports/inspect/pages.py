"""Helpers to write the page of `vitrail inspect` and to decode its numbers."""

import base64

import numpy as np

from vitrail.reports.inspect.inspection_page import Inspection


def write_page(results, output, *, full=False, force=False):
    """Write the folder of panel results, and return the content of `inspect.json`."""
    return Inspection(results, full).save(output, force=force).numbers


def unpack(packed):
    """Decode the numbers that `pack` encoded, like the script of the page."""
    integers = np.frombuffer(base64.b64decode(packed["bytes"]), f"<i{packed['bits'] // 8}")
    return integers.astype(np.float64) * packed["step"]
