"""A server that speaks the Hugging Face hub's protocol: listings, redirects, ranges, refusals."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_STORAGE = re.compile(r"/storage/([0-9a-f]+)")


@dataclass
class Repo:
    files: dict[str, bytes]
    is_gated: bool = False  # the listing is public, the files are for a token
    lfs_above: int = 1000  # larger files are stored apart, under their sha256


@dataclass
class FakeHub:
    """What the server holds and does, and what it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    token: str = "hf_secret"
    cut_after: int | None = None  # bytes of a stored file's body, after which it hangs up
    hang_after: int | None = None  # bytes, after which it sends no more until it may
    served: dict[str, bytes] = field(default_factory=dict)  # by path: other bytes than are listed
    listed: dict[str, str] = field(default_factory=dict)  # by path: another name in listings
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # with the range
    tokens_at_storage: list[str] = field(default_factory=list)
    ignores_ranges: bool = False
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})  # their commits
    url: str = ""

    def add(self, repo: str, files: dict[str, bytes], *, is_gated: bool = False) -> None:
        self.repos[repo] = Repo(files, is_gated)

    def ranges(self, method: str = "GET", part: str = "/storage/") -> list[str | None]:
        return [one for how, path, one in self.requests if how == method and part in path]

    def stored(self, digest: str) -> bytes | None:
        for repo in self.repos.values():
            for path, content in repo.files.items():
                if hashlib.sha256(content).hexdigest() == digest:
                    return self.served.get(path, content)
        return None


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if match := _API.fullmatch(path):
            self._list(match[1], match[2] or "main")
        elif match := _RESOLVE.fullmatch(path):
            self._resolve(match[1], match[3])
        elif match := _STORAGE.fullmatch(path):
            token = self.headers.get("Authorization")
            self.hub.tokens_at_storage += [token] if token else []
            self._send_stored(match[1])
        else:
            self._refuse(404, "EntryNotFound")

    def _list(self, name: str, revision: str) -> None:
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._refuse(401, "RepoNotFound")  # as the hub does: it may be private
        commit = self.hub.revisions.get(revision)
        if revision in self.hub.revisions.values():
            commit = revision
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for path, content in repo.files.items():
            entry: dict[str, object] = {
                "rfilename": self.hub.listed.get(path, path),
                "size": len(content),
                "blobId": git_digest(content),
            }
            if len(content) > repo.lfs_above:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        answer = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": []}
        body = json.dumps(answer | {"downloads": 0, "siblings": siblings}).encode()
        return self._send(200, body, {"Content-Type": "application/json"})

    def _resolve(self, name: str, path: str) -> None:
        repo = self.hub.repos.get(name)
        if repo is None or path not in repo.files:
            return self._refuse(404, "EntryNotFound" if repo else "RepoNotFound")
        if repo.is_gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            status = 403 if self.headers.get("Authorization") else 401
            return self._refuse(status, "GatedRepo")
        content = repo.files[path]
        if len(content) <= repo.lfs_above:
            etag = f'"{git_digest(content)}"'
            served = self.hub.served.get(path, content)
            return self._send(200, served, {"ETag": etag, "X-Repo-Commit": COMMIT})
        digest = hashlib.sha256(content).hexdigest()
        headers = {
            "Location": self.hub.url.replace("127.0.0.1", "localhost") + f"/storage/{digest}",
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{digest}"',
            "X-Repo-Commit": COMMIT,
        }
        return self._send(302, b"", headers)

    def _send_stored(self, digest: str) -> None:
        content = self.hub.stored(digest)
        assert content is not None
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or self.hub.ignores_ranges:
            return self._send(200, content, {}, cut_after=self.hub.cut_after)
        start, stop = int(asked[1]), int(asked[2] or len(content) - 1) + 1
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return self._send(206, content[start:stop], headers, cut_after=self.hub.cut_after)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.hang_after is not None and len(body) > self.hub.hang_after:
            self.wfile.write(body[: self.hub.hang_after])
            while self.hub.hang_after is not None:
                time.sleep(0.01)
            self.close_connection = True
        elif cut_after is not None and len(body) > cut_after:
            self.wfile.write(body[:cut_after])
            self.close_connection = True  # in the middle of the body
        else:
            self.wfile.write(body)


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
