"""A local server with the protocol of the Hugging Face Hub, which also serves plain files.

It answers as the Hub does: a repository's files at /OWNER/NAME/resolve/REVISION/FILE with the commit and the file's
hash in headers, large files by a redirect to another path that takes ranges, errors with the header X-Error-Code.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LARGE = (".safetensors", ".bin", ".npz", ".pth")


class HubServer:
    """Repositories and files to serve, faults to inject, and the received requests."""

    def __init__(self):
        self.repositories = {}  # by name: files and commit, or "renamed"; "tag", "gated", "private"
        self.files = {}  # plain ones, by name
        self.faults = defaultdict(list)  # by a part of the path: what the next answers to it are
        self.requests = []  # (method, path, headers with names in lower case)
        self.uploads = defaultdict(dict)
        self.token = "hf_right"
        server = self

        class Handler(_Handler):
            hub = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # Large files come from another host than the Hub, which must not see the token.
        port = self._server.server_address[1]
        self.address, self.storage = f"http://localhost:{port}", f"http://127.0.0.1:{port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def publish(self, name, folder_or_files, **about):
        """Add a repository; its commit depends on its content."""
        files = folder_or_files
        if not isinstance(files, dict):
            files = {path.name: path.read_bytes() for path in folder_or_files.iterdir() if path.is_file()}
        content = "".join(f"{key}{hashlib.sha1(files[key]).hexdigest()}" for key in sorted(files))
        commit = hashlib.sha1((name + content).encode()).hexdigest()
        self.repositories[name] = {"files": files, "commit": commit, **about}
        return commit

    def asked(self, method="GET", part=""):
        """Return the paths of requests, without those of listings."""
        return [path for verb, path, _ in self.requests if verb == method and part in path]

    def blob(self, digest):
        for repository in self.repositories.values():
            for content in repository["files"].values():
                if hashlib.sha256(content).hexdigest() == digest:
                    return content
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def _answer(self):
        hub = self.hub
        hub.requests.append((self.command, self.path, {key.lower(): value for key, value in self.headers.items()}))
        self.fault = None
        for part, waiting in hub.faults.items():
            if part in self.path and waiting:
                self.fault = waiting.pop(0)
                break
        with contextlib.suppress(ConnectionError):
            if isinstance(self.fault, int):
                return self._send(self.fault, b"")
            if isinstance(self.fault, dict):
                return self._send_just(**self.fault)
            path = unquote(self.path.partition("?")[0])
            if path.startswith("/files/"):
                content = hub.files.get(path.removeprefix("/files/"))
                if content is None:
                    return self._send(404, b"")
                if isinstance(content, str):
                    return self._send(302, b"", Location=content)
                return self._file(content, hashlib.md5(content).hexdigest())
            if path.startswith("/cdn/"):
                return self._file(hub.blob(path.removeprefix("/cdn/")), "irrelevant")
            if self.command == "POST":
                return self._upload(path)
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
                return self._listing(match[1], match[2], match[3] or "main")
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._resolve(*match.groups())
            return self._send(404, b"")

    def _repository(self, name, revision, *, for_files):
        """Return the repository if the client may read it at this revision; otherwise send the error."""
        repository = self.hub.repositories.get(name)
        authorization = self.headers.get("Authorization")
        if authorization and authorization != f"Bearer {self.hub.token}":
            return self._send(401, b"", **{"X-Error-Message": "Invalid credentials in Authorization header"})
        if repository is None or (repository.get("private") and not authorization):
            # As the Hub does it: who is not logged in is not told whether it exists.
            return self._send(404 if authorization else 401, b"", **{"X-Error-Code": "RepoNotFound"})
        if repository.get("gated") and for_files and not authorization:
            return self._send(401, b"", **{"X-Error-Code": "GatedRepo"})
        if repository.get("gated") == "refused" and for_files:
            return self._send(403, b"", **{"X-Error-Code": "GatedRepo"})
        if "renamed" not in repository and revision not in ("main", repository["commit"], repository.get("tag")):
            return self._send(404, b"", **{"X-Error-Code": "RevisionNotFound"})
        return repository

    def _listing(self, name, kind, revision):
        repository = self._repository(name, revision, for_files=False)
        if repository is None:
            return None
        if "renamed" in repository:
            return self._send(307, b"", Location=self.path.replace(name, repository["renamed"]))
        files = repository["files"]
        if kind == "tree":
            rows = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": _git(files[name])} for name in files
            ]
            return self._send(200, json.dumps(rows).encode())
        siblings = [{"rfilename": name} for name in files]
        about = {"id": name, "modelId": name, "sha": repository["commit"], "siblings": siblings, "tags": []}
        about |= {"private": False, "gated": bool(repository.get("gated")), "downloads": 0, "likes": 0}
        return self._send(200, json.dumps(about).encode())

    def _resolve(self, name, revision, file):
        repository = self._repository(name, revision, for_files=True)
        if repository is None:
            return None
        if "renamed" in repository:
            return self._send(307, b"", Location=self.path.replace(name, repository["renamed"]))
        commit = {"X-Repo-Commit": repository["commit"]}
        content = repository["files"].get(file)
        if content is None:
            return self._send(404, b"", **commit, **{"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha256(content).hexdigest()
        if not file.endswith(LARGE):
            return self._file(content, _git(content), **commit)
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return self._send(302, b"", Location=f"{self.hub.storage}/cdn/{digest}", **commit, **linked)

    def _file(self, content, etag, **headers):
        """Send a file, or the requested byte range."""
        if content is None:
            return self._send(404, b"")
        if self.headers.get("If-None-Match") == f'"{etag}"':
            return self._send(304, b"", ETag=f'"{etag}"')
        headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        is_same = self.headers.get("If-Range") in (None, f'"{etag}"')
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if byte_range and is_same:
            start = int(byte_range[1])
            if start >= len(content):
                return self._send(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(206, content[start:], **headers)
        return self._send(200, content, **headers)

    def _send_just(self, status, body=b"", **headers):
        """Send these headers and no others."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        # Only an answer without its true length must end with the connection, which the client would else use again.
        self.close_connection = headers.get("Content_Length") != str(len(body))

    def _send(self, status, body, **headers):
        """Send an answer. Faults: ("cut", n) ends the connection after n bytes, ("size", n) states another size,
        "wrong" changes the content."""
        kind, number = self.fault if isinstance(self.fault, tuple) else (self.fault, 0)
        length = number if kind == "size" else len(body)
        if kind == "wrong" and body:
            body = bytes([body[0]]) + body[1:-1] + bytes([body[-1] ^ 1])
        self.send_response(status)
        for key, value in ({"Content-Length": length} | headers).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "cut":
            self.wfile.write(body[:number])
            self.close_connection = True
            return
        self.wfile.write(body)

    # What `huggingface_hub.upload_folder` needs.

    def _upload(self, path):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            return self._send(200, json.dumps({"url": f"{self.hub.address}/{name}", "id": name}).encode())
        if path == "/api/validate-yaml":
            self.hub.uploads["card"] = json.loads(body)
            return self._send(200, b'{"errors": [], "warnings": []}')
        name, kind = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path).groups()
        if kind == "preupload":
            files = json.loads(body)["files"]
            answer = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._send(200, json.dumps({"files": answer}).encode())
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.hub.uploads[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        answer = {"commitUrl": f"{self.hub.address}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}
        return self._send(200, json.dumps(answer).encode())


def _git(content):
    """Return the hash by which git identifies the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
