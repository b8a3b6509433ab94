"""Telemetry of optional packages is off: no file in the home folder, no DNS lookup."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import vitrail
from vitrail.core.optional import import_without_telemetry

PLAIN = "import onnxruntime"
OURS = "from vitrail.inference.engine import import_engine_package; import_engine_package('onnxruntime', 'onnx')"

if find_spec("onnxruntime") is None:  # an import would be what is tested
    pytest.skip("onnxruntime is not installed", allow_module_level=True)


def alone(home):
    """Return an environment without the variables by which the library detects a test machine."""
    return {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(vitrail.__file__).parents[1])}


def left_behind(home, script):
    home.mkdir()
    subprocess.run([sys.executable, "-c", script], check=True, env=alone(home))
    return [path.name for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("package", "extra"), [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_importing_extras_writes_nothing_to_the_home_folder(package, extra, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    ours = OURS.replace("'onnxruntime', 'onnx'", f"{package!r}, {extra!r}")
    assert left_behind(tmp_path / "ours", ours) == []
    if not left_behind(tmp_path / "plain", f"import {package}"):
        pytest.skip(f"this build of {package} leaves nothing behind by itself, so the test shows nothing")


def test_child_processes_inherit_telemetry_variables_and_user_values_are_kept(tmp_path):
    names = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")
    child = f"import os; print([os.environ.get(name) for name in {names}])"
    script = f"{OURS}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    environment = {**alone(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "0"}
    done = subprocess.run([sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['1', '0']\n", "")


def test_early_import_of_an_extra_prints_one_note(monkeypatch, capsys):
    import_without_telemetry("onnxruntime")  # from now on it is imported, and quiet
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    import_without_telemetry("onnxruntime")
    import_without_telemetry("onnxruntime")
    message = capsys.readouterr().err
    assert message.startswith("note: onnxruntime was imported before vitrail could switch off")
    assert message.count("\n") == 1
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


@pytest.mark.slow
def test_importing_extras_makes_no_dns_lookup(tmp_path):
    """The library waits some seconds before its lookup; both processes wait longer."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    processes = []
    for name, script in (("plain", PLAIN), ("ours", OURS)):
        (tmp_path / name).mkdir()
        trace = ["strace", "-f", "-qq", "-e", "trace=socket", "-o", str(tmp_path / f"{name}.trace")]
        command = [*trace, sys.executable, "-c", f"{script}; import time; time.sleep(12)"]
        processes.append(subprocess.Popen(command, env=alone(tmp_path / name), stderr=subprocess.PIPE, text=True))
    messages = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        pytest.skip(f"strace cannot be used here: {messages}")
    plain, ours = ((tmp_path / f"{name}.trace").read_text().count("AF_INET") for name in ("plain", "ours"))
    assert ours == 0
    if not plain:
        pytest.skip("this build of onnxruntime opens no socket by itself, so the test shows nothing")
