"""A small server that speaks as much of the Hub's API as `push` and `pull` need, over real HTTP.

Every file is uploaded in a commit as it is (the Hub stores large ones elsewhere), and a commit is
named by a number.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from huggingface_hub import constants


class HubServer:
    """Repositories by name, each a list of commits; a commit is a table of files."""

    def __init__(self) -> None:
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.unknown: list[str] = []
        self.broken: set[str] = set()  # files that cannot be downloaded
        self.damaged: set[str] = set()  # files that arrive with another last byte
        self.downloads: list[str] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision: "main", or the name of a commit."""
        commits = self.commits[repo]
        number = len(commits) - 1 if revision == "main" else int(revision, 16)
        return commits[number]

    def sha(self, repo: str, revision: str = "main") -> str:
        commits = self.commits[repo]
        return f"{len(commits) - 1:040x}" if revision == "main" else revision


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args) -> None:
        pass

    def _send(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode(), Content_Type="application/json")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        hub, body = self.server_hub, self._body()
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if repo in hub.commits:
                self._json({"url": f"{hub.url}/datasets/{repo}", "error": "exists"}, 409)
                return
            hub.commits[repo] = [{}]
            hub.private[repo] = bool(asked.get("private")) or asked.get("visibility") == "private"
            self._json({"url": f"{hub.url}/datasets/{repo}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/datasets/(.+?/.+?)/preupload/(\w+)", path):
            names = [f["path"] for f in json.loads(body)["files"]]
            self._json(
                {
                    "files": [
                        {"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names
                    ]
                }
            )
        elif found := re.fullmatch(r"/api/datasets/(.+?/.+?)/commit/(\w+)", path):
            files = dict(hub.files(found[1]))
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            hub.commits[found[1]].append(files)
            oid = hub.sha(found[1])
            self._json({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/c/{oid}"})
        elif found := re.fullmatch(r"/api/datasets/(.+?/.+?)/paths-info/(\w+)", path):
            form = parse_qs(body.decode()) if body[:1] != b"{" else json.loads(body)
            files = hub.files(found[1], found[2])
            self._json([_entry(n, files[n]) for n in form["paths"] if n in files])
        else:
            self._unknown()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server_hub, self.path.split("?")[0]
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(\w+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/(\w+)(/.*)?", path):
            everything = "recursive=false" not in self.path
            folder = "" if everything else (found[3] or "").strip("/")
            self._json(list(_tree(hub.files(found[1], found[2]), folder, everything)))
        elif path == "/api/agent-harnesses":  # which programs the client recognises
            self._send(404)
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
            self._file(found[1], found[2], found[3])
        else:
            self._unknown()

    def _info(self, repo: str, revision: str) -> None:
        hub = self.server_hub
        if repo not in hub.commits:
            self._send(404, b"{}", X_Error_Code="RepoNotFound")
            return
        if revision != "main" and not re.fullmatch(r"[0-9a-f]{40}", revision):
            self._send(404, b"{}", X_Error_Code="RevisionNotFound")
            return
        files = hub.files(repo, revision)
        siblings = [{"rfilename": n, "size": len(b), "blobId": _oid(b)} for n, b in files.items()]
        about = {"id": repo, "sha": hub.sha(repo, revision), "siblings": siblings}
        self._json(about | {"private": hub.private.get(repo, False)})

    def _file(self, repo: str, revision: str, name: str) -> None:
        hub = self.server_hub
        data = hub.files(repo, revision).get(name) if repo in hub.commits else None
        if data is None:
            self._send(404, b"", X_Error_Code="EntryNotFound")
            return
        if self.command == "GET":
            if name in hub.broken:
                self._send(503)
                return
            if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                first, last = int(part[1]), min(int(part[2]), len(data) - 1)
                hub.downloads.append(f"{name} {last + 1 - first}")
                where = f"bytes {first}-{last}/{len(data)}"
                self._send(206, data[first : last + 1], Content_Range=where)
                return
            hub.downloads.append(name)
        etag = _oid(data)
        if name in hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._send(
            200,
            data,
            ETag=f'"{etag}"',
            X_Repo_Commit=hub.sha(repo, revision),
            Content_Length=str(len(data)),
        )

    def _unknown(self) -> None:
        self.server_hub.unknown.append(f"{self.command} {self.path}")
        self._send(404, b"{}")


def _tree(files: dict[str, bytes], folder: str, everything: bool) -> Iterator[dict]:
    """Entries below a folder; not `everything`: those directly in it, with its directories."""
    inside = {name.removeprefix(f"{folder}/"): name for name in files if name.startswith(folder)}
    for short, name in inside.items():
        if everything or "/" not in short:
            yield _entry(name, files[name])
    if not everything:
        for part in sorted({short.split("/")[0] for short in inside if "/" in short}):
            path = f"{folder}/{part}".lstrip("/")
            yield {"type": "directory", "path": path, "oid": _oid(path.encode())}


def _entry(name: str, data: bytes) -> dict:
    return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def on_this_machine(monkeypatch, tmp_path) -> HubServer:
    """Start a server, and send the Hub's own client to it."""
    hub = HubServer()
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "none.json"), False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.split("/", 3)[3]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{template}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub
