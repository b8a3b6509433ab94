"""Import optional packages with their telemetry switched off.

Vitrail uses no network unless the user names a remote source. The same must hold for the packages that it imports.
"""

import importlib
import os
import sys
from types import ModuleType

from vitrail.core.errors import MissingError, first_line, library_memory_error
from vitrail.core.terminal import say

# ONNX Runtime (from 1.29 on) writes a device id and a database into the user's home when it is imported, and contacts
# its maker some seconds later. Its function `disable_telemetry_events` comes too late; the variable does not.
_TELEMETRY_VARIABLES = {"onnxruntime": "ORT_DISABLE_TELEMETRY", "huggingface_hub": "HF_HUB_DISABLE_TELEMETRY"}
_IMPORT_TIME_REPORTERS = ("onnxruntime",)

# OpenVINO has no such variable. It uses this package to write an id into the user's home and to contact a host when it
# is imported, and works without the package.
_TELEMETRY_PACKAGES = {"openvino": "openvino_telemetry"}


def import_without_telemetry(package: str) -> ModuleType:
    """Import and return an optional package with its telemetry switched off, also for child processes.

    This sets environment variables, except those that the user has set. If a package was imported too early, a note is
    printed.
    """
    for telemetry_user, variable in _TELEMETRY_VARIABLES.items():
        if variable in os.environ:
            continue
        os.environ[variable] = "1"
        if telemetry_user in _IMPORT_TIME_REPORTERS and sys.modules.get(telemetry_user) is not None:
            say(
                f"note: {telemetry_user} was imported before vitrail could switch off its telemetry; set"
                f" {variable}=1 in the environment to prevent it"
            )
    telemetry_package = _TELEMETRY_PACKAGES.get(package.partition(".")[0])
    if telemetry_package is None or telemetry_package in sys.modules:
        return importlib.import_module(package)
    sys.modules[telemetry_package] = None  # ty: ignore[invalid-assignment] - importing it then fails
    try:
        return importlib.import_module(package)
    finally:
        del sys.modules[telemetry_package]


def import_extra(package: str, *, extra: str, subject: str) -> ModuleType:
    """Import and return a package of an extra. Raise MissingError, which says how to install it, if it is missing."""
    try:
        return import_without_telemetry(package)
    except Exception as error:
        root = package.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root:
            raise MissingError.for_extra(subject, extra, root) from None
        if (memory_error := library_memory_error(error)) is not None:
            raise memory_error from None
        # The package is installed, but a shared library is missing or built for another machine.
        raise MissingError(f"{subject} needs {package}, which cannot be imported ({first_line(error)}).") from None
