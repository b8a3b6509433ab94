"""Remote sources of weights: the Hub's client and files at https addresses, against a server on this machine."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import vitrail
from tests.bundles.test_convert import CLOTHES, small
from tests.hub_server import HubServer
from tests.paths import FIXTURES, ROOT
from tests.peers import import_peer
from vitrail.bundles.catalogue import Published
from vitrail.bundles.convert import UserHints, convert, import_weights
from vitrail.bundles.parity import prove
from vitrail.bundles.remote import transport, web
from vitrail.bundles.remote.registry import REMOTES, remote_prefix
from vitrail.core.errors import CorruptFileError, MissingError, UsageError, VitrailError
from vitrail.core.files import user_folder
from vitrail.evaluation.protocols import evaluate
from vitrail.models.zoo import MODELS

pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
import huggingface_hub.constants
import huggingface_hub.errors


@pytest.fixture(scope="module")
def server():
    hub_server = HubServer()
    yield hub_server
    hub_server.close()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a small ViT in the formats of vitrail, timm, transformers and Google, without vitrail.json."""
    folder = tmp_path_factory.mktemp("published")
    vitrail.save(small(), folder / "ours")
    for to in ("timm", "huggingface", "google"):
        convert(str(folder / "ours"), folder / to, to, verifies=False, images=CLOTHES)
        for name in ("vitrail.json", "manifest.json", "README.md"):
            (folder / to / name).unlink(missing_ok=True)
    return folder


@pytest.fixture
def hub(server, published, tmp_path, monkeypatch):
    """The test server as the Hub, with an empty cache. Connections to other machines fail the test."""
    server.repositories.clear()
    server.files.clear()
    server.faults.clear()
    server.publish("timm/small", published / "timm", tag="v1.0")
    server.requests.clear()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_URL_HOSTS", frozenset({"localhost"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(web, "_PAUSE", 0.01)
    monkeypatch.setattr("time.sleep", lambda _, sleep=time.sleep: sleep(0.01))  # the client waits between attempts
    connect = socket.socket.connect

    def connect_locally(self, address):
        assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)
    return server


def fetch(source, **options):
    return import_weights(source, UserHints(), **options)


def leftovers(folder):
    """Names of the files in a cache, without locks and the client's own bookkeeping."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "CACHEDIR.TAG")]
    return sorted(path.name for path in files if not {"refs", ".locks", "trees"} & set(path.parts))


# The Hub


def test_a_repository_is_fetched_once_and_then_read_from_the_cache_also_offline(hub, tmp_path, monkeypatch):
    commit = hub.repositories["timm/small"]["commit"]
    imported = fetch("hf:timm/small")
    weights = hub.repositories["timm/small"]["files"]["model.safetensors"]
    digest = hashlib.sha256(weights).hexdigest()
    source = {"address": f"hf:timm/small@{commit}", "sha256": {"model.safetensors": digest}}
    assert imported.bundle.provenance["source"] == source
    assert imported.bundle.labels == small().labels
    assert hub.asked("GET", "/cdn/") == [f"/cdn/{digest}"]
    agents = " ".join(headers.get("user-agent", "") for _, _, headers in hub.requests)
    assert "telemetry" not in agents
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    hub.requests.clear()
    again = fetch("hf:timm/small")
    assert [request[:2] for request in hub.requests if request[0] == "GET"] == [("GET", "/api/models/timm/small")]
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = fetch("hf:timm/small")
    assert (hub.requests, offline.notes) == ([], imported.notes)
    assert again.bundle.provenance == offline.bundle.provenance == imported.bundle.provenance


def test_only_weights_and_documents_are_fetched_and_safetensors_before_pickles(hub, published):
    files = {path.name: path.read_bytes() for path in (published / "timm").iterdir()}
    more = {"pytorch_model.bin": b"never", "tf_model.h5": b"never", "onnx/model.onnx": b"never", "script.py": b"never"}
    hub.publish("timm/more", {**files, **more, "README.md": b"---\nlicense: mit\n---\n"})
    assert fetch("hf:timm/more").bundle.provenance["licence"] == "mit"
    requested = {path.rpartition("/")[2] for path in hub.asked("HEAD")}
    assert requested == {"README.md", "config.json", "model.safetensors"}


def test_load_and_create_fetch_only_the_source_that_the_user_named(hub, published, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "ViT-Toy/16", small().model.config.replace(name="ViT-Toy/16"))
    entry = Published(name="toy.mit", model="ViT-Toy/16", pixels=64, classes=5, hub="timm/small", licence="mit")
    monkeypatch.setattr("vitrail.bundles.pretrained.catalogue", lambda: {"toy.mit": entry})
    monkeypatch.setattr("vitrail.bundles.convert.catalogue", lambda: {"toy.mit": entry})
    expected = vitrail.load(published / "ours").model.state_dict()
    for source in ("hf:timm/small", "toy.mit"):
        loaded = vitrail.load(source)
        assert loaded.provenance["source"]["address"].startswith("hf:timm/small@")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    assert capsys.readouterr().err.count("fetching") == 1  # the second time, the cache has it
    for name in ("toy.mit", "ViT-Toy/16", "small", "hf:timm/small"):
        model = vitrail.create(name, pretrained=True, classes=2, dropout=0.1)
        assert (model.config.classes, model.config.dropout, model.training) == (2, 0.1, True)
        assert torch.equal(model.pos_embed, expected["pos_embed"])
    requests = len(hub.requests)
    (tmp_path / "toy.mit").symlink_to(published / "ours")
    monkeypatch.chdir(tmp_path)
    vitrail.load("toy.mit")  # a path that exists is never fetched
    vitrail.create("ViT-Toy/16")
    for source in ("toy.mti", published / "nothing"):
        with pytest.raises(UsageError, match="Bundle must be a folder that exists"):
            vitrail.load(source)
    assert len(hub.requests) == requests


def test_revisions_are_fetched_and_cached_separately(hub, published):
    first = hub.repositories["timm/small"]["commit"]
    assert fetch("hf:timm/small@v1.0").fetched.address.endswith(first)
    assert fetch(f"hf://timm/small@{first}").fetched.address.endswith(first)
    with pytest.raises(UsageError, match=r"Revision must be a branch, tag or commit of hf:timm/small, got 'v9'\."):
        fetch("hf:timm/small@v9")
    second = hub.publish("timm/small", published / "huggingface")
    imported = fetch("hf:timm/small")
    assert imported.fetched.address.endswith(second)
    assert imported.library == "huggingface"


def test_a_renamed_repository_is_fetched_with_a_note(hub, monkeypatch):
    hub.repositories["old/name"] = {"renamed": "timm/small", "files": {}, "commit": ""}
    imported = fetch("hf:old/name")
    assert imported.notes[0] == "hf:old/name is now called hf:timm/small"
    assert imported.fetched.address.startswith("hf:timm/small@")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch("hf:old/name").fetched.path.is_dir()


def test_sharded_weights_pickles_and_unusual_names_are_fetched(hub, published, tmp_path):
    import torch
    from safetensors.torch import load, save

    tensors = load((published / "timm" / "model.safetensors").read_bytes())
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    files = {file: save({name: tensors[name] for name in part}) for file, part in parts.items()}
    config = (published / "timm" / "config.json").read_bytes()
    hub.publish(
        "me/shards", {**files, "model.safetensors.index.json": json.dumps(index).encode(), "config.json": config}
    )
    imported = fetch("hf:me/shards")
    assert sorted(imported.fetched.weights) == sorted(files)
    with pytest.raises(UsageError, match="--sha256 must be used with a single file"):
        fetch("hf:me/shards", sha256="0" * 64)
    torch.save(tensors, tmp_path / "odd-name.pth")
    hub.publish("me/odd", {"odd-name.pth": (tmp_path / "odd-name.pth").read_bytes(), "config.json": config})
    assert fetch("hf:me/odd").tensors == len(tensors)
    index["weight_map"][names[0]] = "lost.safetensors"
    hub.publish("me/lost", {**files, "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(CorruptFileError, match=r"must have the file lost\.safetensors"):
        fetch("hf:me/lost")


def test_an_uploaded_bundle_is_fetched_unchanged(hub, published, tmp_path):
    hub.publish("me/bundle", published / "ours")
    convert("hf:me/bundle", tmp_path / "back", "vitrail", images=CLOTHES)
    for name in ("model.safetensors", "labels.json", "preprocess.json"):
        assert (tmp_path / "back" / name).read_bytes() == (published / "ours" / name).read_bytes()
    hub.publish("me/several", FIXTURES / "bundle-format-2")
    assert fetch("hf:me/several").bundle.answer.thresholds == (0.25, 0.5, 0.75)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf:no/such", "Repository must be one that the Hub has, got 'hf:no/such'."),
        ("hf:a/b/c", "Repository must be hf:owner/name"),
        ("hf:", "Repository must be hf:owner/name"),
        ("hf:a/b@", "Repository must be hf:owner/name"),
        ("hf:a/..", "Repository must be hf:owner/name"),
        ("hf:me/gated", "hf:me/gated is gated: accept its terms at http://localhost"),
        ("hf:me/private", "If it is private, log in"),
        (
            "hf:me/empty",
            "Folder must hold one checkpoint (.safetensors, .npz, .pth, .pt or .bin), got 0 in 'hf:me/empty'.",
        ),
    ],
)
def test_repositories_that_cannot_be_fetched_give_an_error_of_one_line(
    hub, published, tmp_path, call, address, message
):
    hub.publish("me/gated", published / "timm", gated="manual")
    hub.publish("me/private", published / "timm", private=True)
    hub.publish("me/empty", {"README.md": b"nothing"})
    done = call("convert", address, tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path / "hub") == []


def test_tokens_open_gated_repositories_and_stay_with_the_hub(hub, published, monkeypatch):
    hub.publish("me/gated", published / "timm", gated="manual")
    hub.publish("me/refused", published / "timm", gated="refused")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch("hf:me/gated").tensors
    stored = [headers for _, path, headers in hub.requests if path.startswith("/cdn/")]
    assert stored
    assert not any("authorization" in headers for headers in stored)
    with pytest.raises(UsageError, match="hf:me/refused is gated"):
        fetch("hf:me/refused")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UsageError, match=r"The Hub refuses the token for hf:timm/small \(401\)"):
        fetch("hf:timm/small")


def test_an_interrupted_connection_is_resumed_where_it_ended(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)  # it keeps whole chunks
    hub.faults["/cdn/"] += [("cut", 1000), ("cut", 500)]
    assert fetch("hf:timm/small").tensors
    ranges = [headers.get("range") for _, path, headers in hub.requests if path.startswith("/cdn/")]
    assert ranges == [None, "bytes=1000-", "bytes=1500-"]


@pytest.mark.parametrize("fault", [503, ("cut", 10), "wrong"])
def test_persistent_faults_give_an_error_of_one_line_and_leave_no_file(hub, tmp_path, call, fault):
    hub.faults["/cdn/"] += [fault] + [("cut", 0) if isinstance(fault, tuple) else fault] * 40
    done = call("convert", "hf:timm/small", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("vitrail: ")
    expected = "is corrupt: its hash must be" if fault == "wrong" else "The Hub cannot be reached"
    assert expected in done.stderr
    assert not (tmp_path / "out").exists()
    config = hub.repositories["timm/small"]["files"]["config.json"]
    names = leftovers(tmp_path / "hub")
    assert {path.read_bytes() for path in (tmp_path / "hub").rglob("*") if path.name in names} == {config}
    hub.faults.clear()
    assert fetch("hf:timm/small").tensors


def test_a_failed_listing_falls_back_to_the_cache_with_a_note(hub):
    hub.faults["/api/models"] += [503] * 10
    with pytest.raises(
        VitrailError, match=r"cannot be reached \(it answers 503\), and hf:timm/small is not in the cache"
    ):
        fetch("hf:timm/small")
    hub.faults.clear()
    fetch("hf:timm/small")
    hub.faults["/api/models"] += [503] * 10
    assert (
        fetch("hf:timm/small").notes[0] == "The Hub cannot be reached (it answers 503): the copy in the cache is used"
    )


@pytest.mark.parametrize(
    "body", [b"<html>log in</html>", b"null", b"[]", b"{}", b'{"id": "timm/small", "sha": "../../x", "siblings": []}']
)
def test_responses_that_are_not_from_the_hub_give_an_error_or_the_cached_copy(hub, tmp_path, call, body):
    response = {"status": 200, "body": body, "Content_Length": str(len(body)), "Content_Type": "text/html"}
    hub.faults["/api/models"] += [response]
    done = call("convert", "hf:timm/small", tmp_path / "out")
    assert done.returncode == 1
    reason = "The Hub cannot be reached (the response is not from the Hub)"
    assert done.stderr.startswith(f"vitrail: {reason}, and hf:timm/small is")
    assert leftovers(tmp_path / "hub") == []
    fetch("hf:timm/small")
    hub.faults["/api/models"] += [response]
    assert f"{reason}: the copy in the cache is used" in fetch("hf:timm/small").notes


def test_an_unreachable_hub_gives_instructions_to_fetch_on_another_machine(hub, monkeypatch, tmp_path, call):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://localhost:1")
    done = call("convert", "deit-ti16.in1k", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "hf download timm/deit_tiny_patch16_224.fb_in1k --local-dir FOLDER" in done.stderr
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and hf:" in call("convert", "deit-ti16.in1k", tmp_path / "out").stderr


def test_a_corrupt_file_in_the_cache_is_refused_and_fetched_again(hub, tmp_path):
    weights = fetch("hf:timm/small").fetched.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.resolve().write_bytes(content)
    with pytest.raises(CorruptFileError, match="is corrupt"):
        fetch("hf:timm/small")
    assert fetch("hf:timm/small").tensors


def test_a_file_that_cannot_be_read_is_removed_from_the_cache(hub, tmp_path):
    hub.publish("me/none", {"model.safetensors": b"\x08\0\0\0\0\0\0\0{ none }"})
    with pytest.raises(CorruptFileError, match="cannot be read"):
        fetch("hf:me/none")
    assert leftovers(tmp_path / "hub") == []


def test_a_file_with_another_hash_than_requested_is_refused(hub, tmp_path, call):
    digest = hashlib.sha256(hub.repositories["timm/small"]["files"]["model.safetensors"]).hexdigest()
    assert fetch("hf:timm/small", sha256=digest.upper()).tensors
    with pytest.raises(CorruptFileError, match=f"must have the SHA-256 {'0' * 64}, got {digest}"):
        fetch("hf:timm/small", sha256="0" * 64)
    with pytest.raises(UsageError, match="SHA-256 must be 64 hexadecimal digits, got 'abc'"):
        fetch("hf:timm/small", sha256="abc")


def test_a_missing_client_gives_an_error_of_one_line(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingError, match=r"needs the 'hub' extra .* pip install -c constraints.txt \"\.\[hub\]\""):
        fetch("hf:timm/small")


def test_a_full_disk_during_a_fetch_from_the_hub_leaves_no_file(hub, tmp_path, call):
    with mock.patch("huggingface_hub.file_download.http_get", side_effect=OSError(28, "No space left on device")):
        done = call("convert", "hf:timm/small", tmp_path / "out")
    assert done.returncode == 1
    assert "could not be fetched into the cache (No space left on device). No partial file is kept." in done.stderr
    assert leftovers(tmp_path / "hub") == []


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_written_folders_are_uploaded_unchanged_and_open_from_the_hub(hub, published, tmp_path, monkeypatch, to):
    """The client's `upload_folder` uploads the folder; the library and vitrail open the repository."""
    peer = import_peer("timm" if to == "timm" else "transformers")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    bundle = dataclasses.replace(small(), provenance={"licence": "CC BY 4.0"})
    vitrail.save(bundle, tmp_path / "ours")
    convert(str(tmp_path / "ours"), tmp_path / to, to, verifies=False, images=CLOTHES)
    api = huggingface_hub.HfApi(endpoint=hub.address)  # the module's own one keeps the address it was imported with
    api.create_repo("me/mine", exist_ok=True)
    api.upload_folder(repo_id="me/mine", folder_path=tmp_path / to)
    uploaded = hub.uploads.pop("me/mine")
    assert sorted(uploaded) == sorted(path.name for path in (tmp_path / to).iterdir())
    card = huggingface_hub.ModelCard(uploaded["README.md"].decode()).data
    assert (card.library_name, card.pipeline_tag) == (peer.__name__, "image-classification")
    assert (card.license, card.license_name) == ("other", "CC BY 4.0")
    hub.publish("me/mine", uploaded)
    if to == "timm":
        theirs = peer.create_model("hf-hub:me/mine", pretrained=True, cache_dir=tmp_path / "hub").eval()
    else:
        model = peer.AutoModelForImageClassification.from_pretrained("me/mine", cache_dir=tmp_path / "hub").eval()
        theirs = lambda images: model(images).logits  # noqa: E731
    proof = prove(bundle.model, bundle.preprocess, theirs, to, CLOTHES)
    assert proof["equal_answers"] == 40
    back = fetch("hf:me/mine").bundle
    assert (back.labels, back.preprocess, back.model.config) == (bundle.labels, bundle.preprocess, bundle.model.config)
    assert back.provenance["licence"] == "CC BY 4.0"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["timm", "huggingface", "safetensors"])
def test_deit_from_the_hub_has_its_known_accuracy(hub, shared, tmp_path, form):
    """Published as by timm, by transformers and as a single file: proved, and 356 of 500 photos are correct."""
    import_peer("transformers" if form == "huggingface" else "timm")
    files = {path.name: path.read_bytes() for path in (shared / "deit-ti16").iterdir()}
    hints = UserHints()
    if form == "huggingface":
        convert(str(shared / "deit-ti16"), tmp_path / "ours", "vitrail", verifies=False, images=CLOTHES)
        convert(str(tmp_path / "ours"), tmp_path / "theirs", "huggingface", verifies=False, images=CLOTHES)
        names = ("config.json", "preprocessor_config.json", "model.safetensors")
        files = {name: (tmp_path / "theirs" / name).read_bytes() for name in names}
    elif form == "safetensors":
        files = {"model.safetensors": files["model.safetensors"]}
        hints = UserHints(preprocess=("resize=shorter", "crop_fraction=0.9", "interpolation=bicubic"))
    hub.publish("facebook/deit", files)
    report = convert("hf:facebook/deit", tmp_path / "out", "vitrail", hints=hints, images=CLOTHES)
    assert report["proofs"][0]["equal_answers"] == 40
    scores = evaluate(tmp_path / "out", str(shared / "imagenet-val-500"))
    assert round(scores["accuracy"] * scores["count"]) == 356


def test_an_interrupted_fetch_gives_an_error_of_one_line_and_leaves_no_file(hub, tmp_path, call):
    with mock.patch("huggingface_hub.file_download.http_get", side_effect=KeyboardInterrupt):
        done = call("convert", "hf:timm/small", tmp_path / "out")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "vitrail: interrupted")
    assert leftovers(tmp_path / "hub") == []


ISOLATED_SCRIPT = """
import os, subprocess, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.hub_server import HubServer
server = HubServer()
server.publish("timm/small", Path({folder!r}))
server.files["small.safetensors"] = (Path({folder!r}) / "model.safetensors").read_bytes()
os.environ["HF_ENDPOINT"] = server.address
for number, source in enumerate(("hf:timm/small", f"{{server.storage}}/files/small.safetensors", "hf:timm/none")):
    command = [sys.executable, "-m", "vitrail", "convert", source, f"out-{{number}}", "--no-verify"]
    print(subprocess.run(command, check=False).returncode)
os.environ["HF_ENDPOINT"] = "https://huggingface.co"
for number, source in enumerate(("hf:timm/small", "hf:timm/other"), 3):
    command = [sys.executable, "-m", "vitrail", "convert", source, f"out-{{number}}", "--no-verify"]
    print(subprocess.run(command, check=False).returncode)
"""


@pytest.mark.slow
def test_without_a_network_only_the_local_server_is_contacted(published, tmp_path):
    """In a network namespace with only the loopback device, so that the real Hub cannot be reached."""
    script = ISOLATED_SCRIPT.format(tests=str(ROOT), folder=str(published / "timm"))
    isolate = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*isolate, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare cannot create a network namespace")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "VITRAIL_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = str(Path(vitrail.__file__).parents[1])
    command = [*isolate, sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    codes = [line for line in done.stdout.splitlines() if line.isdecimal()]
    assert codes == ["0", "0", "2", "0", "1"], done.stderr
    assert "note: The Hub cannot be reached (" in done.stderr
    assert "hf download timm/other --local-dir FOLDER" in done.stderr


# Addresses


def serve(hub, published, kind="timm", name="small.safetensors"):
    source = published / kind / ("model.npz" if kind == "google" else "model.safetensors")
    hub.files[name] = source.read_bytes()
    return f"{hub.storage}/files/{name}"


def test_a_file_is_fetched_once_and_then_only_revalidated(hub, published, tmp_path):
    address = serve(hub, published, "google", "small.npz")
    report = convert(address, tmp_path / "out", "vitrail", verifies=False, images=CLOTHES)
    digest = hashlib.sha256(hub.files["small.npz"]).hexdigest()
    assert report["source"] == {"address": address, "sha256": {"small.npz": digest}}
    assert vitrail.load(tmp_path / "out").provenance["source"] == report["source"]
    fetch(address)
    assert [headers.get("if-none-match") is None for _, _, headers in hub.requests] == [True, False]
    fetch(address, sha256=digest)  # the cached file has this hash, so nothing is requested
    assert len(hub.requests) == 2
    hub.files["small.npz"] = (published / "timm" / "model.safetensors").read_bytes()
    with pytest.raises(CorruptFileError, match="does not match its file type"):
        fetch(address)


def test_a_query_is_not_recorded(hub, published):
    assert "key" not in json.dumps(fetch(serve(hub, published) + "?key=secret").bundle.provenance)


def test_an_interrupted_fetch_is_resumed_now_and_by_the_next_command(hub, published, tmp_path, call):
    address = serve(hub, published)
    size = len(hub.files["small.safetensors"])
    hub.faults["/files/"] += [("cut", 700), ("cut", 300)]
    assert fetch(address).tensors
    assert [headers.get("range") for _, _, headers in hub.requests] == [None, "bytes=700-", "bytes=1000-"]
    shutil.rmtree(user_folder())
    hub.requests.clear()
    hub.faults["/files/"] += [("cut", 700)] + [("cut", 0)] * 20
    done = call("convert", address, tmp_path / "out", "--no-verify")
    assert done.returncode == 1
    assert f"the connection ended after 700 of {size:,} bytes). 700 bytes are kept" in done.stderr
    assert not (tmp_path / "out").exists()
    hub.faults.clear()
    hub.requests.clear()
    assert call("convert", address, tmp_path / "out", "--no-verify").returncode == 0
    assert [headers.get("range") for _, _, headers in hub.requests] == ["bytes=700-"]


def test_an_interrupted_new_version_keeps_the_cached_copy_and_is_resumed(hub, published):
    address = serve(hub, published)
    fetch(address)
    serve(hub, published, "huggingface")
    hub.faults["/files/"] += [("cut", 700)] + [("cut", 0)] * 20
    imported = fetch(address)
    assert (imported.library, "the copy in the cache is used" in imported.notes[0]) == ("timm", True)
    hub.faults.clear()
    hub.requests.clear()
    assert fetch(address).library == "huggingface"
    assert [headers.get("range") for _, _, headers in hub.requests] == ["bytes=700-"]


def test_a_wrong_setting_is_refused_before_anything_is_fetched(hub, call, tmp_path):
    done = call("convert", "hf:timm/small", tmp_path / "out", "--model", "ViT-X/16")
    assert (done.returncode, hub.requests) == (2, [])


def test_a_file_that_has_changed_is_fetched_from_the_beginning(hub, published):
    address = serve(hub, published)
    hub.faults["/files/"] += [("cut", 700)] + [("cut", 0)] * 20
    with pytest.raises(VitrailError, match="700 bytes are kept"):
        fetch(address)
    hub.faults.clear()
    serve(hub, published, "huggingface")
    assert fetch(address).library == "huggingface"


def test_a_partial_download_is_not_continued_with_another_version(hub, published):
    """Responses of servers that ignore If-Range."""
    address = serve(hub, published)
    content, etag = hub.files["small.safetensors"], hashlib.md5(hub.files["small.safetensors"]).hexdigest()
    size, rest = len(content), b"\0" * (len(content) - 700)
    content_range = f"bytes 700-{size - 1}/{size}"
    for headers in (
        {"ETag": '"other"', "Content_Range": content_range},
        {"Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content_Range": content_range},
        {"Content_Range": content_range},
        {"ETag": f'"{etag}"', "Content_Range": f"bytes 700-{size - 1}/*"},
        {"ETag": f'"{etag}"', "Content_Range": f"bytes 701-{size - 1}/{size}"},
    ):
        hub.faults["/files/"] += [
            ("cut", 700),
            {"status": 206, "body": rest, "Content_Length": str(len(rest)), **headers},
        ]
        download = fetch(address).fetched
        assert download.path.read_bytes() == content
        download.discard()
    part = {"ETag": f'"{etag}"', "Content_Range": f"bytes 700-799/{size}", "Content_Length": "100"}
    hub.faults["/files/"] += [("cut", 700), {"status": 206, "body": content[700:800], **part}]
    hub.requests.clear()
    download = fetch(address).fetched
    assert download.path.read_bytes() == content
    assert [headers.get("range") for _, _, headers in hub.requests] == [None, "bytes=700-", "bytes=800-"]
    download.discard()
    hub.requests.clear()
    wrong_version = {
        "status": 206,
        "body": rest,
        "Content_Length": str(len(rest)),
        "ETag": '"other"',
        "Content_Range": content_range,
    }
    hub.faults["/files/"] += [("cut", 700), wrong_version] * 40
    with pytest.raises(VitrailError, match="cannot be fetched"):
        fetch(address)
    assert len(hub.requests) < 10


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"status": 206, "body": b"PK\3\4", "Content_Length": "4", "Content_Range": "bytes 0-3/9"}, "206 Partial"),
        ({"status": 204}, "the server answers 204 No Content, which is not a complete file"),
        ({"status": 200, "Content_Length": "0"}, "the file is empty"),
        ({"status": 200, "body": b"0\r\n\r\n", "Transfer_Encoding": "chunked"}, "the file is empty"),
        ({"status": 200, "body": b"PK\3\4"}, "the server does not state the size of the file"),
        ({"status": 304}, "the server answers 304 Not Modified"),
        ({"status": 302, "Location": "http://[::1", "Content_Length": "0"}, "an address that cannot be read"),
    ],
)
def test_a_response_that_is_not_a_complete_file_is_refused(hub, tmp_path, call, response, reason):
    hub.faults["/files/"] += [response]
    done = call("convert", f"{hub.storage}/files/x.npz", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert f"got '{hub.storage}/files/x.npz' (" in done.stderr
    assert reason in done.stderr.splitlines()[-1]
    assert leftovers(tmp_path / "home") == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://localhost:1/x.txt", "Address must end in .safetensors, .npz, .pth"),
        ("https://huggingface.co/google/vit", "A repository of the Hugging Face Hub is hf:owner/name."),
        ("https:///x.npz", "Address must be https://host/path/file"),
        ("https://host:99999999/x.npz", "Address must be https://host/path/file"),
        ("https://me:word@localhost/x.npz", "Address must be without a name and password"),
        ("http://example.com/x.npz", "Address must begin with https:// (http:// only on this machine)"),
        ("HUB/none.npz", "got 'HUB/none.npz' (the server answers 404 Not Found)"),
        ("HUB/outward.npz", "it redirects to 'http://example.com/x.npz', which is not https"),
        ("HUB/file.npz", "Redirection to url 'file:///etc/passwd' is not allowed"),
        (
            "HUB/circle.npz",
            "(the server answers 302 The HTTP server returned a redirect error that would lead to an inf",
        ),
        ("HUB/page.npz", "does not match its file type: it begins with b'<html>"),
        ("HUB/huge.npz", "must have at most 17,179,869,184 bytes, got 17,179,869,185 or more"),
        ("HUB/torn.npz", "cannot be read as npz"),
        ("https://localhost:1/x.npz", "(Connection refused). Or fetch it on another machine (curl -LO)"),
    ],
)
def test_addresses_without_a_checkpoint_give_an_error_and_leave_no_file(hub, tmp_path, call, address, message):
    hub.files |= {"outward.npz": "http://example.com/x.npz", "file.npz": "file:///etc/passwd"}
    hub.files |= {"circle.npz": f"{hub.storage}/files/circle.npz"}
    hub.files |= {"page.npz": b"<html>log in</html>", "huge.npz": b"PK", "torn.npz": b"PK\3\4 torn"}
    hub.faults["huge.npz"] = [("size", 16 * 2**30 + 1)]
    done = call("convert", address.replace("HUB", f"{hub.storage}/files"), tmp_path / "out")
    lines = done.stderr.replace(f"{hub.storage}/files", "HUB").splitlines()
    assert done.returncode in (1, 2)
    assert message in lines[-1]
    assert [line for line in lines if not line.startswith(("fetching ", "vitrail: "))] == []
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path / "home") == []


def test_a_download_with_another_hash_than_requested_is_removed(hub, published, tmp_path, call):
    done = call("convert", serve(hub, published), tmp_path / "out", "--sha256", "0" * 64)
    assert done.returncode == 1
    assert f"must have the SHA-256 {'0' * 64}, got " in done.stderr
    assert leftovers(tmp_path / "home") == []
    local_file = published / "timm" / "model.safetensors"
    options = (tmp_path / "out", "--sha256", "0" * 64)
    assert "must have the SHA-256" in call("convert", local_file, *options).stderr
    assert "--sha256 must be used with a single file" in call("convert", local_file.parent, *options).stderr


def test_without_a_connection_the_cached_copy_is_used_with_a_note(hub, published):
    address = serve(hub, published)
    fetch(address)
    hub.faults["/files/"] += [503] * 20
    assert (
        fetch(address).notes[0]
        == f"{address} cannot be reached (the server answers 503 Service Unavailable): the copy in the cache is used"
    )


def test_a_full_disk_during_a_fetch_from_an_address_leaves_no_file(hub, published, tmp_path, call):
    with mock.patch("vitrail.bundles.remote.web._copy_stream", side_effect=OSError(28, "No space left on device")):
        done = call("convert", serve(hub, published), tmp_path / "out")
    assert done.returncode == 1
    assert "could not be written into the cache" in done.stderr
    assert leftovers(tmp_path / "home") == []
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10)):
        done = call("convert", serve(hub, published), tmp_path / "out")
    assert done.returncode == 1
    assert "do not fit on the disk" in done.stderr


def test_partial_downloads_that_cannot_be_resumed_are_removed(hub, published, tmp_path, call):
    """Without a version of the file (ETag or date), its rest cannot be requested."""
    content = (published / "timm" / "model.safetensors").read_bytes()
    cut = {"status": 200, "body": content[:9000], "Content_Length": str(len(content))}
    chunk = {"status": 200, "body": b"10\r\n" + content[:8], "Transfer_Encoding": "chunked"}
    for response, reason in (
        (cut, f"ended after 9,000 of {len(content):,} bytes"),
        (chunk, "the connection ended early"),
    ):
        hub.faults["/files/"] = [response] * 9
        done = call("convert", f"{hub.storage}/files/x.safetensors", tmp_path / "out")
        assert done.returncode == 1
        assert f"({reason}). Or fetch it" in done.stderr.splitlines()[-1].replace(
            "the connection ended after", "ended after"
        )
        assert leftovers(tmp_path / "home") == []


@pytest.mark.parametrize("state", ['{"validator": 5, "sha256": 3}', '{"part": "a\\nb"}', "[" * 10**5, "{}", "x"])
def test_an_invalid_state_file_is_ignored(hub, published, state):
    address = serve(hub, published)
    download = fetch(address).fetched
    (download.path.parent / "state.json").write_text(state)
    download.path.with_name("small.safetensors.part").write_bytes(b"other")
    assert fetch(address).fetched.path.read_bytes() == hub.files["small.safetensors"]


def test_an_interrupted_tls_connection_is_resumed(hub, published, monkeypatch):
    copy_stream, errors = web._copy_stream, [ssl.SSLEOFError(8, "EOF occurred in violation of protocol")] * 2

    def break_twice(response, file, *arguments):
        if errors:
            file.write(response.read(1000))
            raise errors.pop()
        return copy_stream(response, file, *arguments)

    monkeypatch.setattr(web, "_copy_stream", break_twice)
    download = fetch(serve(hub, published)).fetched
    assert download.path.read_bytes() == hub.files["small.safetensors"]
    assert hub.requests[-1][2]["range"] == "bytes=2000-"


def test_a_folder_in_place_of_the_cached_file_gives_an_error_of_one_line(hub, published, tmp_path, call):
    address = serve(hub, published)
    download = fetch(address).fetched
    download.discard()
    download.path.mkdir()
    done = call("convert", address, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.endswith("cannot be used (Is a directory). Remove it, or set VITRAIL_HOME to another folder.\n")


def test_a_read_only_cache_is_used_and_a_full_one_gives_an_error_of_one_line(
    hub, published, tmp_path, monkeypatch, call
):
    """On real file systems, which only root can mount."""
    folder = tmp_path / "mount"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, folder], capture_output=True, check=False).returncode == 0

    if os.getuid() != 0 or not shutil.which("mount") or not mount("-t", "tmpfs", "-o", "size=256k", "tmpfs"):
        pytest.skip("only root can mount a file system")
    try:
        monkeypatch.setenv("VITRAIL_HOME", str(folder))
        address = serve(hub, published)
        assert "do not fit on the disk" in call("convert", address, tmp_path / "out").stderr
        chunks = {"status": 200, "body": b"60000\r\n" + hub.files["small.safetensors"][: 6 * 16**4] + b"\r\n0\r\n\r\n"}
        hub.faults["/files/"] = [{**chunks, "Transfer_Encoding": "chunked"}]
        assert "(No space left on device)" in call("convert", address, tmp_path / "out").stderr
        assert leftovers(folder) == []
        assert mount("-o", "remount,size=8m")
        fetch_file = web.Web().fetch  # without reading the file, which would keep the file system busy
        fetch_file(address, None)
        assert mount("-o", "remount,ro")
        assert fetch_file(address, None).notes == ()
        hub.faults["/files/"] = [503] * 9
        assert fetch_file(address, None).notes[0].endswith("the copy in the cache is used")
        assert "(Read-only file system)" in call("convert", f"{hub.storage}/files/y.npz", tmp_path / "out").stderr
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# Servers whose responses do not end, and addresses that are not public


class StreamServer:
    """A server that sends the same chunks of bytes to every client, until the client disconnects."""

    def __init__(self, chunks, host="127.0.0.1"):
        stream = self
        self.requests = []

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                stream.requests.append(self.rfile.readline())
                while self.rfile.readline().strip():
                    pass
                with contextlib.suppress(OSError):
                    for chunk in chunks():
                        self.wfile.write(chunk)

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}/x.npz"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def drip(content):
    """Yield single bytes slowly, and then the last byte without end."""
    for byte in itertools.chain(content, itertools.repeat(content[-1])):
        time.sleep(0.02)
        yield bytes([byte])


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def impatient(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(transport, "PATIENCE", 0.3)
    monkeypatch.setattr(web, "_PAUSE", 0.01)
    monkeypatch.setattr(web, "_ATTEMPTS", 2)


@pytest.mark.parametrize(
    "chunks",
    [
        lambda: drip(OK),
        lambda: itertools.chain([OK], drip(b"X-Header: y")),
        lambda: itertools.chain([OK + b"Content-Length: 999999\r\n\r\nPK"], drip(b"x")),
        lambda: itertools.chain([OK + b"Transfer-Encoding: chunked\r\n\r\n"], drip(b"0")),
        lambda: itertools.chain([OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"], itertools.repeat(b"a: b\r\n" * 999)),
        lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 999),
    ],
)
def test_a_response_that_is_slow_or_never_ends_gives_an_error_of_one_line(impatient, call, tmp_path, chunks):
    with StreamServer(chunks) as stream:
        start = time.monotonic()
        done = call("convert", stream.address, tmp_path / "out")
    assert done.returncode == 1
    assert "cannot be fetched (less than 30,000 bytes arrived in 0.3 seconds)" in done.stderr.splitlines()[-1]
    assert time.monotonic() - start < 10
    assert leftovers(tmp_path / "home") == []


def test_attempts_that_receive_one_byte_each_are_given_up(impatient, call, tmp_path):
    head = OK + b'ETag: "a"\r\nContent-Length: 99999\r\n\r\n'
    offsets = itertools.count(2)

    def chunks():
        time.sleep(0.05)
        if stream.requests[1:]:
            offset = next(offsets)
            headers = f"Content-Range: bytes {offset}-99998/99999\r\nContent-Length: {99999 - offset}\r\n\r\n"
            return [b'HTTP/1.1 206 Partial Content\r\nETag: "a"\r\n' + headers.encode() + b"x"]
        return [head + b"PK"]

    with StreamServer(chunks) as stream:
        done = call("convert", stream.address, tmp_path / "out")
    assert done.returncode == 1
    assert "the connection ended after" in done.stderr.splitlines()[-1]
    assert len(stream.requests) < 5


def test_the_body_of_a_redirect_is_not_read(impatient, call, tmp_path):
    """urllib would read it into memory."""
    redirect = b"HTTP/1.1 302 Found\r\nLocation: /y.npz\r\nTransfer-Encoding: chunked\r\n\r\n"
    with StreamServer(
        lambda: itertools.chain([redirect], itertools.repeat(b"ffff\r\n" + bytes(0xFFFF) + b"\r\n"))
    ) as stream:
        done = call("convert", stream.address, tmp_path / "out")
    assert done.returncode == 2
    assert "redirect error that would lead to an infinite loop" in done.stderr


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_public_address_cannot_redirect_to_a_private_one(impatient, call, tmp_path, monkeypatch, name):
    """The first server counts as public; the second, on this machine, gets no request."""
    is_public = transport.is_public
    monkeypatch.setattr(transport, "is_public", lambda host: host == "127.0.0.2" or is_public(host))
    with StreamServer(lambda: [OK + b"Content-Length: 2\r\n\r\nPK"]) as private:
        target = private.address.replace("127.0.0.1", name).encode()
        answer = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + target + b"\r\n\r\n"
        with StreamServer(lambda: [answer], host="127.0.0.2") as public:
            done = call("convert", public.address, tmp_path / "out")
        assert (len(public.requests), len(private.requests)) == (1, 0)
        assert done.returncode == 2
        assert re.search(r"it redirects to (127.0.0.1|::1), which is not a public address", done.stderr)
        with StreamServer(lambda: [answer]) as typed:  # a private one, so that the other may be private, too
            call("convert", typed.address, tmp_path / "out")
        assert (len(typed.requests), len(private.requests)) == (1, 1)


def test_a_host_name_that_changes_its_ip_address_cannot_reach_a_private_one(impatient, call, tmp_path, monkeypatch):
    is_public, look_up, times = transport.is_public, socket.getaddrinfo, []
    monkeypatch.setattr(transport, "is_public", lambda host: host == "127.0.0.2" or is_public(host))

    def rebind(host, *rest, **options):
        if host == "localhost":
            times.append(host)
            host = "127.0.0.2" if len(times) == 1 else "127.0.0.1"
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    answer = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: /y.npz\r\n\r\n"
    with StreamServer(lambda: [answer], host="127.0.0.2") as public:
        done = call("convert", public.address.replace("127.0.0.2", "localhost"), tmp_path / "out")
    assert (len(times), len(public.requests)) == (2, 1)
    assert "it redirects to 127.0.0.1, which is not a public address" in done.stderr


PRIVATE = """
10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 127.1.2.3 224.0.0.1 240.0.0.1 :: ::1 fe80::1
fe80::1%eth0 fc00::1 fec0::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:db8::1
localhost a.localhost
"""


@pytest.mark.parametrize("private", PRIVATE.split())
def test_private_addresses_are_recognised(private):
    assert not transport.is_public(private)


@pytest.mark.parametrize("public", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "example.com"])
def test_public_addresses_are_recognised(public):
    assert transport.is_public(public)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_an_https_address_is_fetched_and_cannot_redirect_to_http(hub, published, certificate, monkeypatch):
    """The Hub server, behind TLS."""
    secure = HubServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    secure._server.socket = context.wrap_socket(secure._server.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    base = f"{secure.address}/files".replace("http:", "https:")
    try:
        serve(secure, published)
        secure.files["away.npz"] = serve(hub, published)
        assert fetch(f"{base}/small.safetensors").library == "timm"
        with pytest.raises(UsageError, match=r"it redirects to 'http://127\.0\.0\.1.*', which is not https"):
            fetch(f"{base}/away.npz")
        assert hub.requests == []
    finally:
        secure.close()


# Processes


SLOW_SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
sys.path.insert(0, {tests!r})
from vitrail.bundles.remote import web
web.CHUNK = 20_000
copy_stream = web._copy_stream
class SlowResponse:
    def __init__(self, response): self.response = response
    def read(self, size):
        time.sleep(0.05)
        return self.response.read(size)
web._copy_stream = lambda response, *arguments: copy_stream(SlowResponse(response), *arguments)
print(web.Web().fetch({address!r}, None).weights, flush=True)
"""


def start_fetching(address, home):
    """Start a process that fetches an address slowly and prints the hashes of its files."""
    script = SLOW_SCRIPT.format(tests=str(ROOT), address=address)
    environment = {**os.environ, "VITRAIL_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_fetch_a_file_once_and_an_interrupted_one_resumes(server, published, tmp_path):
    server.faults.clear()
    address = serve(server, published)
    server.requests.clear()
    first, second = start_fetching(address, tmp_path), start_fetching(address, tmp_path)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert outputs[0][0] == outputs[1][0] != "", outputs
    assert sorted(headers.get("if-none-match") is None for _, _, headers in server.requests) == [False, True]
    shutil.rmtree(tmp_path / "weights")
    server.requests.clear()
    third = start_fetching(address, tmp_path)
    while not [path for path in tmp_path.rglob("*.part") if path.stat().st_size]:
        time.sleep(0.01)
    third.send_signal(signal.SIGINT)
    assert third.communicate()[0] == ""
    part_bytes = next(tmp_path.rglob("*.part")).stat().st_size
    assert 0 < part_bytes < len(server.files["small.safetensors"])
    fourth = start_fetching(address, tmp_path)
    assert fourth.communicate(timeout=60)[0] == outputs[0][0]
    assert server.requests[-1][2]["range"] == f"bytes={part_bytes}-"


def test_remote_sources_are_recognised_by_their_prefix():
    assert [remote_prefix(text) for text in ("hf:a/b", "https://a/b", "http://a/b", "/a/b:c", "c:/d", "a/b")] == [
        "hf", "https", "http", None, None, None,
    ]  # fmt: skip
    assert REMOTES["https"] is REMOTES["http"] is web.Web


def test_a_path_that_exists_is_never_fetched(hub, published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deit-ti16.in1k").symlink_to(published / "timm")
    assert fetch("deit-ti16.in1k").library == "timm"
    assert hub.requests == []
