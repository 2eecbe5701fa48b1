"""The page at / as a server gives it; tests/page drives it in a browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.servers import RunningServer, fake_server
from tests.server.test_keys import bearer, with_scopes

import quire.server
from quire.server.keys import KeyRing, KeyScope
from quire.server.page import PAGE_FILES

FOLDER = Path(quire.server.__file__).parent / "static"


@pytest.fixture(scope="module")
def locked(text_model: Path) -> Iterator[RunningServer]:
    ring = KeyRing([with_scopes("alice", KeyScope.INFERENCE)])
    with fake_server(text_model, keys=ring) as server:
        yield server


@pytest.mark.parametrize("path", PAGE_FILES)
def test_its_files_are_the_same_with_and_without_a_key(locked: RunningServer, path: str) -> None:
    bare, keyed = locked.get(path), locked.get(path, bearer("alice"))
    assert bare.status == keyed.status == 200
    assert bare.body == keyed.body == (FOLDER / PAGE_FILES[path]).read_bytes()
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert bare.headers["content-type"].startswith(kind[PAGE_FILES[path].rpartition(".")[2]])


def test_every_file_of_the_folder_is_served() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(PAGE_FILES.values())


@pytest.mark.parametrize("path", PAGE_FILES)
def test_browsers_are_told_to_run_nothing_else(locked: RunningServer, path: str) -> None:
    headers = locked.get(path).headers
    directives = headers["content-security-policy"].split("; ")
    policy = {name: value for name, _, value in (one.partition(" ") for one in directives)}
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[kind] == "'self'", "neither inline nor from another host"
    for kind in ("frame-ancestors", "base-uri", "form-action"):
        assert policy[kind] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_nothing_in_it_is_inline_or_from_elsewhere() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>[^<]", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    for file in FOLDER.iterdir():
        hosts = re.findall(r"https?://[\w.]+", file.read_text())
        assert hosts in ([], ["http://www.w3.org"]), file.name


def test_text_never_becomes_html() -> None:
    for file in FOLDER.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc",
            file.read_text(),
        )
        assert found == [], file.name


def test_the_key_is_in_no_lasting_storage() -> None:
    script = (FOLDER / "api.js").read_text()
    assert re.findall(r"(\w+)\.setItem\(", script) == ["ofTab"]
    assert 'ofTab = storage("sessionStorage")' in script
    assert "KEPT" not in (FOLDER / "app.js").read_text()


def test_a_file_that_a_browser_has_is_not_sent_again(locked: RunningServer) -> None:
    first = locked.get("/static/app.js")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"x", W/{first.headers["etag"]}'):
        again = locked.get("/static/app.js", {"If-None-Match": known})
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    assert locked.get("/static/app.js", {"If-None-Match": '"other"'}).status == 200


def test_head_is_answered_without_a_body(locked: RunningServer) -> None:
    reply = locked.send("HEAD", "/")
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) == (FOLDER / "index.html").stat().st_size


def test_posts_to_it_are_refused(locked: RunningServer) -> None:
    assert locked.post("/", {}).status == 405


def test_it_can_be_left_out(text_model: Path) -> None:
    with fake_server(text_model, page=False) as server:
        for path in PAGE_FILES:
            assert server.get(path).status == 404
        assert server.get("/docs").status == 200
