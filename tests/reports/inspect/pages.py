"""Writing the page of an examination, and reading the numbers it carries."""

import base64

import numpy as np

from vitrail.reports.inspect.inspection_page import Inspection


def write_page(found, output, *, full=False, force=False):
    """Write the folder; return the content of `inspect.json`."""
    return Inspection(found, full).save(output, force=force).numbers


def unpack(packed):
    """What `pack` packed, as the page's script reads it."""
    whole = np.frombuffer(base64.b64decode(packed["bytes"]), f"<i{packed['bits'] // 8}")
    return whole.astype(np.float64) * packed["step"]
