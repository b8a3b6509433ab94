"""Optional packages are imported here, with their telemetry switched off.

Vitrail uses no network unless the user names a remote source; this holds for the packages it imports, too.
"""

import importlib
import os
import sys
from types import ModuleType

from vitrail.core.errors import MissingError, first_line, library_memory_error
from vitrail.core.terminal import say

# ONNX Runtime (from 1.29 on) writes a device id and a database into the user's home as soon as it is imported, and
# looks up its maker's host some seconds later. Its function `disable_telemetry_events` comes too late; this does not.
_SWITCHES = {"onnxruntime": "ORT_DISABLE_TELEMETRY", "huggingface_hub": "HF_HUB_DISABLE_TELEMETRY"}
_REPORT_AT_IMPORT = ("onnxruntime",)

# OpenVINO has no such variable: its import writes an id into the user's home and looks up a host, through this package.
# Without it, OpenVINO goes on.
_REPORTERS = {"openvino": "openvino_telemetry"}


def import_without_telemetry(package: str) -> ModuleType:
    """Import an optional package with its telemetry switched off, here and in child processes. Environment variables
    that the user has set are kept; a note is printed if the package was imported too early."""
    for reporter, variable in _SWITCHES.items():
        if variable in os.environ:
            continue
        os.environ[variable] = "1"
        if reporter in _REPORT_AT_IMPORT and sys.modules.get(reporter) is not None:
            say(
                f"note: {reporter} was imported before vitrail could switch off its telemetry; set"
                f" {variable}=1 in the environment to prevent it"
            )
    reporter = _REPORTERS.get(package.partition(".")[0])
    if reporter is None or reporter in sys.modules:
        return importlib.import_module(package)
    sys.modules[reporter] = None  # ty: ignore[invalid-assignment] - Python then takes it for not installed
    try:
        return importlib.import_module(package)
    finally:
        del sys.modules[reporter]


def import_extra(package: str, *, extra: str, subject: str) -> ModuleType:
    """Import a package of an optional extra; the error says how to install it."""
    try:
        return import_without_telemetry(package)
    except Exception as error:
        root = package.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root:
            raise MissingError.for_extra(subject, extra, root) from None
        if (lacking := library_memory_error(error)) is not None:
            raise lacking from None
        # It is there, but its libraries are not, or not for this machine.
        raise MissingError(f"{subject} needs {package}, which cannot be imported ({first_line(error)}).") from None
