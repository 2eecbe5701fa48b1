"""Runs atheris, a coverage-guided fuzzer, over a reader.

Any error but quire's own, and any memory a file does not account for, ends the run with status 77.
The input is then kept in .pytest_cache/quire-fuzz, as is what was learnt, for the next run.
"""

import sys
import tracemalloc
from pathlib import Path

import atheris  # type: ignore[import-untyped,unused-ignore]

with atheris.instrument_imports(include=["quire.loader", "quire.quant"]):
    from tests.fuzz.inputs import Feed

HOME = Path(__file__).parent.parent.parent / ".pytest_cache" / "quire-fuzz"


def run(name: str, feed: Feed, seeds: list[bytes]) -> None:
    """Fuzz until a find or until libFuzzer's options, given on the command line, say to stop."""
    model, corpus, finds = (HOME / name / part for part in ("model", "corpus", "finds"))
    for folder in (model, corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)

    def test_one_input(content: bytes) -> None:
        feed(model, content)

    options = ["-max_len=4096", f"-artifact_prefix={finds}/", *sys.argv[1:], str(corpus)]
    atheris.Setup([sys.argv[0], *options], test_one_input)
    tracemalloc.start()  # once for all inputs: starting takes longer than reading one
    atheris.Fuzz()
