"""Columns of Parquet and CSV files as lines of a batch, and their answers as such files.

pyarrow reads and writes them. A table cannot be appended to after a crash: answers go to a JSONL
file beside it first, which becomes the table when it is whole.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError, RequestError

SUFFIXES = (".parquet", ".csv")
_ROWS = 1024  # in memory at once

_COLUMNS = ("custom_id", "text", "embedding", "finish_reason", "error")
_NUMBERS = ("prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class TableInput:
    """Which of a table's columns are requests, and what each asks besides."""

    path: Path
    column: str
    id_column: str | None
    endpoint: str
    body: dict[str, Any] = field(default_factory=dict)  # further fields of every request

    def lines(self) -> Iterator[bytes]:
        number = 0
        for rows in _batches(
            self.path, [self.column, *([self.id_column] if self.id_column else [])]
        ):
            for row in rows:
                number += 1
                name = str(number if self.id_column is None else row[self.id_column])
                yield self._line(name, row[self.column])

    def _line(self, name: str, value: object) -> bytes:
        line = {"custom_id": name, "url": self.endpoint, "body": {**self.body, **self._own(value)}}
        return json.dumps(line, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"

    def _own(self, value: object) -> dict[str, object]:
        """A text, or a list of messages where the endpoint takes those."""
        if self.endpoint == "/v1/chat/completions":
            is_list = isinstance(value, list)
            return {"messages": value if is_list else [{"role": "user", "content": value}]}
        return {"prompt" if self.endpoint == "/v1/completions" else "input": value}


def _batches(path: Path, columns: list[str]) -> Iterator[list[dict[str, Any]]]:
    arrow = _pyarrow()
    try:
        if path.suffix == ".parquet":
            file = import_module("pyarrow.parquet").ParquetFile(path)
            _check_columns(path, file.schema_arrow.names, columns)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                yield batch.to_pylist()
        else:
            csv = import_module("pyarrow.csv")
            parse = csv.ParseOptions(newlines_in_values=True)
            convert = csv.ConvertOptions(column_types=dict.fromkeys(columns, arrow.string()))
            reader = csv.open_csv(path, parse_options=parse, convert_options=convert)
            _check_columns(path, reader.schema.names, columns)
            for batch in reader:
                yield batch.select(columns).to_pylist()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except arrow.ArrowInvalid as error:
        raise RequestError(f"{path}: {error}") from None


def _check_columns(path: Path, found: list[str], wanted: list[str]) -> None:
    for name in wanted:
        if name not in found:
            listed = ", ".join(found[:20])
            raise RequestError(f"{path}: there is no column {name!r:.100}; it has {listed}")


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ModuleNotFoundError:
        raise ConfigError("Parquet and CSV files need pyarrow: pip install pyarrow") from None


# ---- answers


def write_table(answers: Iterator[bytes], path: Path) -> None:
    """Lines of answers as a table: a row each, null where there is nothing."""
    arrow = _pyarrow()
    text, number = arrow.string(), arrow.int64()
    types = {"embedding": arrow.list_(arrow.float32())}
    fields = [(name, types.get(name, text)) for name in _COLUMNS]
    schema = arrow.schema([*fields, *((name, number) for name in _NUMBERS)])
    if path.suffix == ".csv":  # which has no lists
        schema = schema.set(2, arrow.field("embedding", text))
    partial = path.with_name(path.name + ".partial")
    with _writer(partial, path.suffix, schema) as writer:
        rows: list[dict[str, Any]] = []
        for answer in answers:
            rows.append(_row_of(answer, as_text=path.suffix == ".csv"))
            if len(rows) == _ROWS:
                writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema=schema))
                rows = []
        writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema=schema))
    partial.replace(path)


def _writer(path: Path, suffix: str, schema: Any) -> Any:
    if suffix == ".parquet":
        return import_module("pyarrow.parquet").ParquetWriter(path, schema)
    return import_module("pyarrow.csv").CSVWriter(path, schema)


def _row_of(answer: bytes, *, as_text: bool) -> dict[str, Any]:
    found = json.loads(answer)
    row: dict[str, Any] = dict.fromkeys((*_COLUMNS, *_NUMBERS))
    row["custom_id"] = found["custom_id"]
    if found["response"] is None:
        return row | {"error": found["error"]["message"]}
    body = found["response"]["body"]
    if found["response"]["status_code"] != 200:
        return row | {"error": body["error"]["message"]}
    usage = body["usage"]
    row["prompt_tokens"] = usage.get("prompt_tokens", usage.get("input_tokens"))
    row["completion_tokens"] = usage.get("completion_tokens", usage.get("output_tokens"))
    if "data" in body:
        vector = body["data"][0]["embedding"]
        return row | {"embedding": json.dumps(vector) if as_text else vector}
    if "output" in body:
        parts = [part for item in body["output"] for part in item.get("content") or ()]
        text = "".join(part["text"] for part in parts if part.get("type") == "output_text")
        return row | {"text": text, "finish_reason": body["status"]}
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return row | {"text": text, "finish_reason": choice["finish_reason"]}
