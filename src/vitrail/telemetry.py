"""Optional packages are imported here, after what they report to their makers has been switched off.

No network unless the user names a remote source: that holds for the packages we import, too.
"""

import importlib
import os
import sys
from types import ModuleType

from vitrail.console import say

# ONNX Runtime (from 1.29 on) writes a device id and a database into the user's home as soon as it is imported, and
# looks up its maker's host some seconds later. Its function `disable_telemetry_events` comes too late; this does not.
_SWITCHES = {"onnxruntime": "ORT_DISABLE_TELEMETRY", "huggingface_hub": "HF_HUB_DISABLE_TELEMETRY"}
_REPORT_AT_IMPORT = ("onnxruntime",)


def import_quietly(package: str) -> ModuleType:
    """Import an optional package with reports to any maker switched off, here and in child processes. A switch that the
    user has set stays as it is; that a package was imported too early for its switch is said."""
    for reporter, variable in _SWITCHES.items():
        if variable in os.environ:
            continue
        os.environ[variable] = "1"
        if reporter in _REPORT_AT_IMPORT and sys.modules.get(reporter) is not None:
            say(
                f"note: {reporter} was imported before vitrail could switch off its reports to its maker; set"
                f" {variable}=1 in the environment to prevent them"
            )
    return importlib.import_module(package)
