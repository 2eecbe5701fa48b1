"""Fuzzes the server in-process, guided by coverage.

python -m tests.fuzz.fuzz_http_guided -max_total_time=60

atheris chooses the bytes that a case is made from (see choices.py), by what they reach in the
server. It starts from tests/fuzz/corpus/http and keeps what it learns and finds in
.pytest_cache/quire-fuzz. A failed check ends the run with another status than 0.
"""

import asyncio
import logging
import sys
from dataclasses import replace

import atheris  # type: ignore[import-untyped,unused-ignore]

with atheris.instrument_imports(include=["quire.server", "uvicorn.protocols.http"]):
    from tests.fuzz.choices import Choices
    from tests.fuzz.fuzz_http import CORPUS
    from tests.fuzz.http_wire import Case, Leaving, case_of
    from tests.fuzz.http_world import world
    from tests.fuzz.kept import HOME


def quick(case: Case) -> Case:
    """The same without its waits for deadlines, which the random runs have."""
    is_waiting = case.leaving is Leaving.TRICKLES or not case.is_sound
    return replace(case, leaving=Leaving.HALF_CLOSES) if is_waiting else case


def main() -> None:
    for name in ("corpus", "finds"):
        (HOME / "http" / name).mkdir(parents=True, exist_ok=True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    opened = world()
    server = loop.run_until_complete(opened.__aenter__())

    def test_one_input(content: bytes) -> None:
        loop.run_until_complete(server.run([quick(case_of(Choices(content)))]))

    limits = ["-max_len=1024", "-len_control=0", f"-artifact_prefix={HOME}/http/finds/"]
    folders = [HOME / "http" / "corpus", CORPUS]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], *map(str, folders)], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
