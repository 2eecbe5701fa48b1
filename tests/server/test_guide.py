"""Every example of the guide is run: a page is a script, its servers are real."""

import hashlib
import re
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.cli.program import quire
from tests.fixture_files import FIXTURES
from tests.hub_server import serving_hub
from tests.llm.text_models import write_text_model
from tests.server.guide import GUIDE, Script, run_page
from tests.server.processes import serving

PAGES = sorted(GUIDE.glob("*.md"))
RUN_HERE = [  # the others' packages are those of tests/clients and tests/ray
    page for page in PAGES if page.stem not in ("clients", "ray")
]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_every_example_runs(page: Path, tmp_path: Path) -> None:
    # Its hint leaves the likeliest token alone: an example without a seed might show nothing.
    model = write_text_model(tmp_path / "model.gguf", sampling={"top_k": 1})
    shutil.copy(model, tmp_path / "other.gguf")
    if page.stem == "bitnet":
        shutil.copytree(FIXTURES / "bitnet-published" / "a" / "hf-packed", tmp_path / "bitnet")
    with serving_hub() as hub, ExitStack() as stack:
        content = model.read_bytes()
        files = {"tiny-Q4_0.gguf": content, "tiny-Q8_0.gguf": content + bytes(9)}
        hub.add("someone/Tiny-GGUF", files)
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
        run_page(page, Script(tmp_path, stack, env=env))


def test_the_guide_has_its_pages() -> None:
    assert [page.stem for page in PAGES] == [
        *("batch", "bitnet", "clients", "configuration", "dialects", "from-llama-cpp"),
        *("from-rust-engines", "from-vllm"),
        *(
            "jobs",
            "keys-and-limits",
            "metrics",
            "models-by-name",
            "page",
            "quick-start",
            "ray",
            "sampling",
            "several-models",
            "structured-output",
            "tools-and-reasoning",
        ),
    ]


def test_every_option_is_in_the_guide_and_no_other() -> None:
    help_text = quire("serve", "--help").out
    options = set(re.findall(r"^  (--[a-z0-9-]+)", help_text, re.M))
    assert len(options) > 20
    documented = set(
        re.findall(r"^\| `(--[a-z0-9-]+)`", (GUIDE / "configuration.md").read_text(), re.M)
    )
    assert documented == options


def test_every_metric_is_in_the_guide(text_model: Path) -> None:
    given = (text_model, "--device", "reference")
    with serving(*given) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := raw.recv(1 << 16):
            answer += piece
    names = set(re.findall(r"# TYPE quire:(\w+)", answer.decode()))
    documented = set(re.findall(r"`(\w+)`", (GUIDE / "metrics.md").read_text()))
    assert len(names) > 25
    assert names <= documented


def test_the_digest_of_the_keys_page_is_that_of_its_key() -> None:
    text = (GUIDE / "keys-and-limits.md").read_text()
    [key] = re.findall(r"printf %s '(\S+)' \| sha256sum", text)
    assert hashlib.sha256(key.encode()).hexdigest() in text
