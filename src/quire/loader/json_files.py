"""How JSON beside a model is read: capped, objects only, without the ways it can break a parser."""

import json
from pathlib import Path

from quire.core.errors import ModelFileError
from quire.loader.reading import DISK, Files, read_capped


def read_json_object(path: Path, limit: int, files: Files = DISK) -> dict[str, object]:
    """The object in a JSON file of at most `limit` bytes."""
    return parse_json_object(read_capped(path, limit, files), path.name)


def parse_json_object(content: bytes, source: str) -> dict[str, object]:
    """The object that JSON text holds; a key that stands twice is refused as ambiguous."""
    try:
        value = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and huge numbers
        raise ModelFileError(f"{source} does not hold sound JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{source} must hold a JSON object, not {type(value).__name__}")
    return value


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        left = dict.fromkeys(fields)
        twice = next(name for name, _ in pairs if left.pop(name, True) is not None)
        raise ValueError(f"key {twice!r:.100} stands there twice")
    return fields
