"""Fuzzes a reader by atheris, which is guided by coverage.

    python -m tests.fuzz.coverage_guided gguf -runs=100000

After the target's name come libFuzzer's options. Any error but quire's own, an input that takes
more than ten seconds or more than two gigabytes ends the run with another status than 0. The input
is then kept in .pytest_cache/quire-fuzz, as is what was learnt, for the next run.
"""

import sys

import atheris  # type: ignore[import-untyped,unused-ignore]

with atheris.instrument_imports(
    include=["quire.loader", "quire.quant", "quire.model", "quire.tokenizer"]
):
    from tests.fuzz.inputs import TARGETS, inputs_of
    from tests.fuzz.kept import HOME


def run(name: str, options: list[str]) -> None:
    """Fuzz until a find or until the options say to stop."""
    corpus, finds = (HOME / name / part for part in ("corpus", "finds"))
    for folder in (corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(inputs_of(name)):
        (corpus / f"seed{number}").write_bytes(content)
    limits = ["-max_len=4096", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]
    arguments = [sys.argv[0], *limits, f"-artifact_prefix={finds}/", *options, str(corpus)]
    feed = TARGETS[name].feed
    atheris.Setup(arguments, feed)
    atheris.Fuzz()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
