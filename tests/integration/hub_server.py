"""A small Hub on localhost: enough of its HTTP interface for the real clients to read and to push repositories."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_API = re.compile(r"^/api/(models|datasets|spaces)/([\w.-]+/[\w.-]+)(?:/([a-z-]+)(?:/([^/]+)(?:/(.*))?)?)?$")
_FILE = re.compile(r"^(?:/(datasets|spaces))?/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)$")


class HubServer:
    """Serves repositories held in memory; used as a context manager.

    `url` goes into `HF_ENDPOINT`; `repos` maps (kind, id) to content by path; `log` lists every request.
    """

    def __init__(self):
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        self.log: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def add(self, kind: str, repo_id: str, folder: Path) -> None:
        """Serve a folder as the repository `repo_id`."""
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        self.repos[kind, repo_id] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    @staticmethod
    def commit(files: dict[str, bytes]) -> str:
        """The commit hash of a state of a repository: 40 hexadecimal digits that depend on its content alone."""
        digest = hashlib.sha1()
        for path, content in sorted(files.items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


def _file_entry(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, status: int, body: bytes, headers: dict[str, str], head_only: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head_only:
            self.wfile.write(body)

    def _json(self, value, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, what: str) -> None:
        headers = {"X-Error-Code": what, "X-Error-Message": f"{what}: {self.path}"}
        self._send(404, b"{}", headers, head_only=self.command == "HEAD")

    def _revision(self, kind: str, repo_id: str, revision: str) -> dict[str, bytes] | None:
        """The files of a repository at a revision; answers 404 itself and returns `None` where there is none."""
        files = self.hub.repos.get((kind, repo_id))
        if files is None:
            self._missing("RepoNotFound")
        elif unquote(revision) not in ("main", self.hub.commit(files)):
            self._missing("RevisionNotFound")
        else:
            return files
        return None

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urlsplit(self.path)
        self.hub.log.append(f"{self.command} {url.path}")
        if match := _API.match(url.path):
            kind, repo_id, verb, revision, path = match.groups()
            files = self._revision(KINDS[kind], repo_id, revision or "main")
            if files is None:
                return
            if verb in (None, "revision"):
                return self._json(self._info(repo_id, files))
            if verb == "tree":
                return self._tree(files, unquote(path or ""), parse_qs(url.query))
        if match := _FILE.match(url.path):
            kind, repo_id, revision, path = match.groups()
            files = self._revision(KINDS[kind or "models"], repo_id, revision)
            if files is None:
                return
            content = files.get(unquote(path))
            return self._missing("EntryNotFound") if content is None else self._content(files, content)
        return self._missing("NotFound")

    def _info(self, repo_id: str, files: dict[str, bytes]) -> dict:
        return {
            "_id": "0",
            "id": repo_id,
            "modelId": repo_id,
            "sha": self.hub.commit(files),
            "siblings": [{"rfilename": path} for path in sorted(files)],
            **{"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0},
        }

    def _tree(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for path, content in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                name = prefix + "/".join(parts[:depth])
                if recursive or depth == 1:
                    entries[name] = {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            if recursive or len(parts) == 1:
                entries[path] = _file_entry(path, content)
        if entries or not prefix:
            self._json(list(entries.values()))
        else:
            self._missing("EntryNotFound")

    def _content(self, files: dict[str, bytes], content: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": self.hub.commit(files),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        head_only = self.command == "HEAD"
        wanted = re.match(r"^bytes=(\d*)-(\d*)$", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, content, headers, head_only)
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last), len(content) - 1) if first and last else len(content) - 1
        if start > end:
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"}, head_only)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return self._send(206, content[start : end + 1], headers, head_only)

    # ------------------------------------------------------------------------------------------------ writing

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def do_POST(self):
        body = self._body()
        url = urlsplit(self.path)
        self.hub.log.append(f"POST {url.path}")
        if url.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") == "Bearer refused":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if url.path == "/api/repos/create":
            request = json.loads(body)
            repo_id = (
                f"{request['organization']}/{request['name']}" if request.get("organization") else request["name"]
            )
            self.hub.repos.setdefault((request.get("type", "model"), repo_id), {})
            return self._json({"url": f"{self.hub.url}/{repo_id}", "id": repo_id})
        match = _API.match(url.path)
        if match is None:
            return self._missing("NotFound")
        kind, repo_id, verb, revision, _ = match.groups()
        files = self._revision(KINDS[kind], repo_id, revision or "main")
        if files is None:
            return None
        if verb == "paths-info":
            text = body.decode()
            paths = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
            return self._json([_file_entry(path, files[path]) for path in paths if path in files])
        if verb == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self._json(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            )
        if verb == "commit":
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            commit = self.hub.commit(files)
            return self._json(
                {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}"}
            )
        return self._missing("NotFound")
