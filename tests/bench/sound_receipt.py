"""A small receipt, and whether other tools find one as the schema has it."""

from typing import Any

import jsonschema

from quire_bench.receipts import Receipt, schema


def make_receipt(**changes: Any) -> Receipt:
    fields: dict[str, Any] = {
        "kind": "throughput",
        "created": "2026-01-02T03:04:05.678Z",
        "command": ["quire", "bench", "throughput"],
        "seed": 7,
        "model": {"name": "dummy:tiny:Q8_0", "sha256": "0" * 64, "quant": "Q8_0"},
        "machine": {"cpu": "a cpu", "cores": 2, "memory_bytes": None, "gpu": None, "os": "an os"},
        "versions": {"python": "3.11.0"},
        "asked": {"device": "auto"},
        "executed": {"device": "reference", "kernels": ["numpy"], "fallback": None},
        "settings": {"requests": 2},
        "samples": {"seconds": [1.0, 2.5]},
        "results": {"tokens_per_second": 3.5, "spread": {"low": 1}, "busy": None},
        "limits": None,
    }
    return Receipt(**(fields | changes))


def is_valid_to_jsonschema(data: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema()).is_valid(data))
