"""The options of `quire batch`."""

import argparse
from pathlib import Path

from quire.cli.options import add_model_options

# Those of quire.server.jobs.lines, which needs an extra.
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

_DESCRIPTION = """\
Answer a file of requests, one JSON object a line as for OpenAI's batches, into another file with a
line for each at the same place. A run that was interrupted goes on where it ended when it is
started again. Lines that are no requests are answered by an error.
"""
_EPILOG = """\
a line of the input, and of the output:
  {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}
  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "body": {...}}, "error": null}

examples:
  quire batch requests.jsonl answers.jsonl --model model.gguf
  quire batch requests.jsonl answers.jsonl --max-batch-size 256 --json
  quire batch questions.csv answers.csv --column question --body '{"max_tokens": 64}'
  quire batch texts.parquet vectors.parquet --column text --endpoint /v1/embeddings
"""


def _input_path(text: str) -> Path:
    return Path("/dev/stdin" if text == "-" else text)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument(
        "input",
        type=_input_path,
        metavar="INPUT",
        help="JSONL (- for standard input), or with pyarrow .parquet or .csv",
    )
    parser.add_argument(
        "output", type=Path, metavar="OUTPUT", help="JSONL, or with pyarrow .parquet or .csv"
    )
    add_model_options(parser)
    add = parser.add_argument_group("requests").add_argument
    add(
        "--max-batch-size", type=int, default=64, metavar="N", help="sequences a step (default: 64)"
    )
    add(
        "--endpoint",
        choices=_ENDPOINTS,
        metavar="URL",
        help="of lines without a url; lines with another are refused",
    )
    add("--column", metavar="NAME", help="of a table: the prompts (default: prompt)")
    add("--id-column", metavar="NAME", help="of a table: the custom_id (default: the row's number)")
    add("--body", metavar="JSON", help="of a table: further fields of every request")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what lines call the model; may be repeated (default: MODEL's name)",
    )
    add(
        "--ignore-unknown-fields",
        action="store_true",
        help="leave out fields of bodies that quire does not know, instead of refusing the line",
    )
    add("--restart", action="store_true", help="answer all lines again")
    add("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(usage_error=parser.error)
