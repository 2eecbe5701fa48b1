"""Reads and writes configurations: TOML files that say how a model is to be run.

[engine]                 fields of EngineConfig
max_batch_size = 16
max_step_tokens = 64

[run]                    where, and with what
device = "cpu"
threads = 4
kv_memory = "2GiB"
kv_cache_dtype = "int8"
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.llm.devices import Options

MAX_CONFIGURATION_BYTES = 1 << 20
# What a value may be; how large, EngineConfig and Options say themselves.
_Kind = type | tuple[type, ...]
_SWITCHES: dict[str, _Kind] = dict.fromkeys(
    ("chunking", "prefix_reuse", "fairness", "plan_ahead"), bool
)
_NUMBERS: dict[str, _Kind] = {option.name: (int, float) for option in fields(EngineConfig)}
_KINDS: dict[str, dict[str, _Kind]] = {
    "engine": {**_NUMBERS, **_SWITCHES, "key_weights": dict},
    "run": {
        "device": str,
        "threads": int,
        "kv_memory": (str, int),
        "kv_cache_dtype": str,
        "max_context": int,
        "invariant": bool,
        "trust_model_file": bool,
        "chat_template": str,
        "i2s_packing": str,
    },
}
_OWN = ("max_batch_size", "batch_timeout_ms")  # of the engine's fields, those of Options as well


def read_configuration(path: str | Path) -> Options:
    """The options that a file holds; a ConfigError names what is wrong in it."""
    data = _parse(Path(path))
    try:
        for table, values in data.items():
            _check(table, values)
        engine = dict(data.get("engine", {}))
        own = {name: engine.pop(name) for name in _OWN if name in engine}
        options = Options(**own, **data.get("run", {}), engine=engine)
        options.engine_config()
        return options
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIGURATION_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > MAX_CONFIGURATION_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_CONFIGURATION_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def _check(table: str, values: object) -> None:
    if table not in _KINDS or not isinstance(values, dict):
        raise ConfigError(f"{table!r} is unknown; there are the tables [engine] and [run]")
    kinds = _KINDS[table]
    for name, value in values.items():
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise ConfigError(f"[{table}] has no {name!r}; there are {known}")
        is_bool = isinstance(value, bool)  # which Python counts among the integers
        if is_bool != (kinds[name] is bool) or not isinstance(value, kinds[name]):
            raise ConfigError(f"[{table}] {name} is {value!r}, which is of the wrong type")


def configuration_text(
    tables: Mapping[str, Mapping[str, int | float | str]], notes: Sequence[str] = ()
) -> str:
    """A configuration as TOML, with notes at its head."""
    lines = [f"# {' '.join(note.split())}" for note in notes]
    for table, values in tables.items():
        _check(table, dict(values))
        # JSON's numbers and strings are TOML's too.
        settings = [
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()
        ]
        lines += ["", f"[{table}]", *settings]
    return "\n".join(lines).lstrip("\n") + "\n"
