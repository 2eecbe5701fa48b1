"""A Chromium for the tests of the page; they are skipped where there is none (`make test-page`)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.page.browser import Browser, open_browser


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="session", autouse=True)
def chromium() -> Iterator[Browser]:
    """Looked for first: no server is started for tests that are skipped."""
    pytest.importorskip("selenium", reason="selenium is not installed: `make test-page` has it")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("chromium and chromedriver are not installed")
    with open_browser(*map(str, paths)) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """With empty storage and a desktop's window; afterwards, what the page did is looked at. Comes
    after its server among a test's arguments, so that the page is left before that ends."""
    chromium.reset()
    yield chromium
    chromium.leave()
    assert chromium.take_errors() == []
    assert chromium.hosts() <= {"127.0.0.1"}, "the page asks no other host"
