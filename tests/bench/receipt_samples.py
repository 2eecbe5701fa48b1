"""Receipts for tests, of samples that the test gives."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire_bench.receipts import Receipt


def receipt(
    samples: Mapping[str, Sequence[float]] | None = None,
    *,
    kind: str = "throughput",
    name: str = "tiny",
    quant: str | None = "Q8_0",
    settings: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Receipt:
    facts: dict[str, Any] = {
        "kind": kind,
        "created": "2026-01-02T03:04:05Z",
        "command": ["quire", "bench", kind],
        "seed": 1,
        "model": {"name": name, "sha256": None, "quant": quant},
        "machine": {"cpu": "a CPU", "cores": 2, "memory_bytes": 1 << 34, "gpu": None, "os": "x"},
        "versions": {"quire": "0.1.0"},
        "asked": {"device": "cpu"},
        "executed": {"device": "cpu", "kernels": ["plain"], "fallback": None},
        "settings": settings or {},
        "samples": samples or {},
        "results": results or {},
        "limits": None,
        **fields,
    }
    return Receipt(**facts)
