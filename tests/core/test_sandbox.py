"""Untrusted files of weights: malicious or corrupt ones give one line, and no code in them is run."""

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.bundles.test_convert import small
from vitrail.bundles.convert import UserHints, import_weights
from vitrail.bundles.weight_files import _read_tensor_file
from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.sandbox import child, read_tensors

ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Evil:
    """An object whose pickle runs code: unpickling creates the file `canary`."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("kind", ["torch", "plain", "nested", "npz", "garbage", "empty", "bomb"])
def test_malicious_pickles_are_rejected_without_running_code(tmp_path, kind):
    canary, path = tmp_path / "canary", tmp_path / "model.pth"
    match kind:
        case "torch":
            torch.save({"state_dict": Evil(canary)}, path)
        case "plain":
            path.write_bytes(pickle.dumps(Evil(canary)))
        case "nested":
            torch.save({"cls_token": torch.zeros(1, 1, 8), "hook": Evil(canary)}, path)
        case "npz":
            path = tmp_path / "model.npz"
            np.savez(path, cls=np.array([Evil(canary)], dtype=object))
        case "garbage":
            path.write_bytes(os.urandom(4096))
        case "empty":
            path.write_bytes(b"")
        case "bomb":
            path = tmp_path / "model.npz"
            header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("embedding/kernel.npy", header.ljust(127) + b"\n" + bytes(1000))
    with pytest.raises(CorruptFileError) as caught:
        import_weights(str(path), UserHints())
    assert "\n" not in str(caught.value)
    assert not canary.exists()


def safetensors(header, payload=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        safetensors({"a": ONE}, bytes(7)),  # cut
        safetensors({"a": ONE}, bytes(9)),  # something behind it
        safetensors({"a": ONE}, bytes(8), length=2**62),
        safetensors({"a": {**ONE, "shape": [2**63]}}, bytes(8)),
        safetensors({"a": {**ONE, "dtype": "F64"}}, bytes(8)),
        safetensors({"a": {**ONE, "data_offsets": [8, 0]}}, bytes(8)),
        safetensors({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, bytes(12)),  # one over the other
        safetensors({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, bytes(20)),  # a hole
        safetensors(b'{"a": '),
        safetensors({}),
        b"",
    ],
)
def test_corrupt_safetensors_are_rejected(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        import_weights(str(path), UserHints())
    assert "\n" not in str(caught.value)


def test_weights_with_nan_are_rejected(tmp_path):
    tensors = small().model.state_dict()
    tensors["blocks.1.mlp.fc1.weight"] = tensors["blocks.1.mlp.fc1.weight"].clone()
    tensors["blocks.1.mlp.fc1.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFileError, match=r"must be finite, got NaN or infinity in blocks\.1\.mlp\.fc1\.weight"):
        import_weights(str(tmp_path / "model.safetensors"), UserHints())


@pytest.mark.parametrize("name", ["x.pth", "x.npz", "model.safetensors", "model.safetensors.index.json"])
def test_pipe_in_place_of_a_checkpoint_is_rejected(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(VitrailError) as caught:
            import_weights(str(source), UserHints())
        assert "\n" not in str(caught.value)


def test_pipe_next_to_a_checkpoint_is_not_read(tmp_path, call):
    save_file(small().model.state_dict(), tmp_path / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json", "README.md", "labels.json", "recipe.toml"):
        os.mkfifo(tmp_path / name)
    assert import_weights(str(tmp_path), UserHints()).library == "timm"
    done = call("convert", tmp_path, tmp_path / "out", "--labels", tmp_path / "labels.json")
    assert (done.returncode, "is not a regular file" in done.stderr) == (2, True)
    done = call(
        "train", "digits", "--model", "ViT-Pico/2", "--output", tmp_path / "out", "--recipe", tmp_path / "recipe.toml"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_documents_are_at_most_64_megabytes(tmp_path, call):
    """Parsing a config.json of 400 MB would need a gigabyte of memory."""
    save_file(small().model.state_dict(), tmp_path / "model.safetensors")
    large = tmp_path / "config.json"
    large.write_bytes(b"[]")
    os.truncate(large, 400_000_000)
    tracemalloc.start()
    for arguments in (
        ("convert", tmp_path, tmp_path / "out"),
        ("info", tmp_path),
        ("convert", "fashion", tmp_path / "out", "--labels", large),
    ):
        done = call(*arguments)
        assert (done.returncode in (1, 2), len(done.stderr.splitlines())) == (True, 1), done.stderr
        assert "it has more than 67,108,864 bytes" in done.stderr
    assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    tracemalloc.stop()


def test_weights_in_npz_are_unpacked_once_and_only_if_they_fit(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", kernel=np.zeros(2**23, np.float32), step=np.zeros(2**23, np.int64))
    notes = []
    tracemalloc.start()
    tensors = _read_tensor_file(tmp_path / "x.npz", notes)
    peak = tracemalloc.get_traced_memory()[1]
    assert (list(tensors), len(notes)) == (["kernel"], 1)
    assert peak < 1.1 * 2**25  # other arrays are not unpacked
    del tensors
    monkeypatch.setattr("vitrail.core.memory.available_memory", lambda: 2**26)
    tracemalloc.reset_peak()
    with pytest.raises(CorruptFileError, match="would fill 100,663,296 bytes"):
        _read_tensor_file(tmp_path / "x.npz", notes)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_pickle_is_read_without_network(tmp_path):
    """The process has its own network namespace if the system allows it, and no sockets in any case."""
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pth")
    script = (
        "import os, runpy, sys\n"
        "program, sys.argv = sys.argv[1], sys.argv[1:]\n"
        "runpy.run_path(program, run_name='__main__')\n"
        "sys.stderr.write(os.readlink('/proc/self/ns/net'))\n"
    )
    arguments = [child.__file__, read_tensors.__file__, tmp_path / "a.pth", tmp_path / "out", str(2**36), *sys.path[1:]]
    done = subprocess.run([sys.executable, "-I", "-c", script, *arguments], capture_output=True, text=True, check=True)
    is_cut = done.stderr != str(Path("/proc/self/ns/net").readlink())
    allowed = subprocess.run(["unshare", "--net", "--map-root-user", "true"], capture_output=True, check=False)
    assert json.loads(done.stdout)["cut"] == is_cut == (allowed.returncode == 0)
    script = (
        "import runpy, socket, sys\n"
        "runpy.run_path(sys.argv[1])['forbid_sockets']()\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.1', 1))\n"
        "except OSError as error:\n"
        "    sys.exit(str(error) != 'no network here')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script, child.__file__], check=False)
    assert done.returncode == 0


def test_sandbox_process_imports_nothing_from_vitrail(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pth")
    script = (
        "import runpy, sys\n"
        "program, sys.argv = sys.argv[1], sys.argv[1:]\n"
        "runpy.run_path(program, run_name='__main__')\n"
        "sys.exit(any(name.partition('.')[0] == 'vitrail' for name in sys.modules))\n"
    )
    arguments = [child.__file__, read_tensors.__file__, tmp_path / "a.pth", tmp_path / "out", str(2**36), *sys.path[1:]]
    done = subprocess.run([sys.executable, "-I", "-c", script, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compressed_pickle_is_rejected_within_the_memory_limit(tmp_path):
    """PyTorch writes uncompressed records but reads compressed ones: here 2 MB unpack to 512 MB."""
    torch.save({"a": torch.zeros(2**27)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    (tmp_path / "plain.pth").unlink()
    with pytest.raises(CorruptFileError, match="would fill more memory than is available, or than a file of its size"):
        import_weights(str(tmp_path / "bomb.pth"), UserHints())


def test_unprivileged_user_can_read_a_pickle(tmp_path):
    """Limits on processes apply to all users except root, so the reader must not start threads."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("to become somebody else, be root and have setpriv")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    torch.save({"a": torch.zeros(300, 300), "epoch": 3}, folder / "a.pth")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [
        sys.executable,
        "-I",
        child.__file__,
        read_tensors.__file__,
        str(folder / "a.pth"),
        str(folder / "out"),
        str(2**36),
        *sys.path[1:],
    ]
    if subprocess.run([*nobody, sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode:
        pytest.skip("nobody else may read this environment")
    done = subprocess.run([*nobody, *command], capture_output=True, text=True, check=False, env=ALONE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["others"] == ["epoch"]
    shutil.rmtree(folder)


def test_averaged_weights_in_a_pickle_are_preferred_with_a_note(tmp_path):
    """Averaged weights are preferred, as in timm, with a note; an argparse.Namespace is accepted."""
    tensors = small().model.state_dict()
    last = {name: tensor + 1 for name, tensor in tensors.items()}
    checkpoint = {"state_dict": last, "state_dict_ema": tensors, "args": argparse.Namespace(lr=0.1), "epoch": 7}
    torch.save(checkpoint, tmp_path / "last.pth.tar")
    imported = import_weights(str(tmp_path / "last.pth.tar"), UserHints())
    assert torch.equal(imported.bundle.model.cls_token, tensors["cls_token"])
    assert "of its tables state_dict_ema is taken, not state_dict" in imported.notes


def test_tensors_larger_than_their_file_are_rejected(tmp_path):
    torch.save({"a": torch.zeros(1).expand(2**33)}, tmp_path / "bomb.pth")
    with pytest.raises(CorruptFileError, match="would fill 34,359,738,368 bytes"):
        import_weights(str(tmp_path / "bomb.pth"), UserHints())


def test_malicious_pickle_is_rejected_in_a_process_without_network(tmp_path):
    """The command runs in a network namespace without interfaces, because it does not need the network."""
    cut = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*cut, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -n is not allowed here")
    canary = tmp_path / "canary"
    torch.save({"state_dict": Evil(canary)}, tmp_path / "evil.pth")
    command = [sys.executable, "-m", "vitrail", "convert", str(tmp_path / "evil.pth"), str(tmp_path / "bundle")]
    done = subprocess.run([*cut, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "No code in it was run" in done.stderr
    assert not canary.exists()
    assert not (tmp_path / "bundle").exists()


def test_a_flipped_bit_in_a_pickle_is_found_by_its_checksum(tmp_path):
    """PyTorch does not verify the checksums that it writes; it can also omit them."""
    weights = torch.arange(1000.0)
    path = tmp_path / "a.pth"
    torch.save({"a": weights}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(weights[500:502].numpy().tobytes(), weights[501:503].numpy().tobytes()))
    assert torch.load(path, weights_only=True)["a"][500] == 501
    with pytest.raises(CorruptFileError, match=r"a.pth' cannot be read \('a/data/0' in it differs from its checksum\)"):
        _read_tensor_file(path, [])
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": weights}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(_read_tensor_file(path, [])["a"], weights)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("name", ["a.npz", "a.pth"])
def test_zips_with_unbounded_compression_are_rejected(tmp_path, name, method):
    with zipfile.ZipFile(tmp_path / name, "w", method) as archive:
        archive.writestr("a.npy", bytes(2**20))
    with pytest.raises(CorruptFileError, match=r"'a.npy' is neither stored nor deflated"):
        _read_tensor_file(tmp_path / name, [])


def test_integer_weights_are_rejected(tmp_path):
    """One changed letter in a header, F32 to I32, gives other numbers from the same bytes."""
    tensors = small().model.state_dict()
    tensors["norm.bias"] = tensors["norm.bias"].view(torch.int32)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CorruptFileError, match=r"must have weights in floating point, got torch.int32 in norm.bias"):
        import_weights(str(tmp_path / "a.safetensors"), UserHints())


def test_tensor_under_two_names_is_rejected(tmp_path):
    """With and without a prefix, or in two files of a sharded checkpoint: one of them would be ignored silently."""
    tensors = small().model.state_dict()
    torch.save({**tensors, "module.norm.bias": tensors["norm.bias"] + 1}, tmp_path / "a.pth")
    with pytest.raises(CorruptFileError, match=r"it has a tensor twice, with and without the prefix module\."):
        _read_tensor_file(tmp_path / "a.pth", [])
    save_file(
        {"mask_token": torch.zeros(1), "teacher.a": torch.zeros(1), "a": torch.ones(1)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(CorruptFileError, match=r"has 3 tensors, but only 2 that differ in more than a prefix"):
        import_weights(str(tmp_path / "a.safetensors"), UserHints())
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, shards / "1.safetensors")
    save_file({"b": torch.ones(1)}, shards / "2.safetensors")
    index = shards / "model.safetensors.index.json"
    for table, reason in (
        ({"a": "1.safetensors", "b": "2.safetensors"}, "lists two files that contain b"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "lists tensors that 2.safetensors lacks: a"),
    ):
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(CorruptFileError, match=reason):
            _read_tensor_file(index, [])


def test_checkpoints_in_folders_that_are_not_utf8_are_read(tmp_path, call):
    folder = tmp_path / os.fsdecode(b"f\xff")
    assert call("convert", "fashion", folder / "timm", "--to", "timm", "--no-verify").returncode == 0
    assert call("convert", folder / "timm", folder / "again", "--no-verify").returncode == 0


@pytest.mark.parametrize("arguments", [["evaluate", "fashion", "fashion-40"], ["predict", "fashion", __file__]])
def test_too_little_memory_to_import_torch_gives_one_line(arguments):
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 300000 && exec "$@"', "sh", sys.executable, "-m", "vitrail", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"vitrail: Memory must be enough to load the libraries, got too little \(.*\)\. .*\n", done.stderr
    )
