"""The ratios that the README opens with are those of the receipts and of the performance pages."""

import re
from pathlib import Path

import pytest

from quire_bench.receipts import number
from quire_bench.report import gather
from quire_bench.report_headline import headline

ROOT = Path(__file__).parents[2]
README, CUDA = (ROOT / name for name in ("README.md", "docs/performance-cuda.md"))
BATCHES = (1, 4, 16, 64, 256)


def rows(page: Path, header: str, num_names: int) -> dict[tuple[str, ...], list[float | None]]:
    """The numbers of the table that begins so, by the words of its first columns."""
    text = page.read_text()
    found: dict[tuple[str, ...], list[float | None]] = {}
    for line in text[text.index(header) :].split("\n\n")[0].splitlines()[2:]:
        cells = [re.sub("[×,](?=\\d|$)", "", cell.strip()) for cell in line.split("|")[1:-1]]
        numbers = [None if cell in ("", "–") else float(cell) for cell in cells[num_names:]]
        found[tuple(cells[:num_names])] = numbers
    return found


SHOWN = rows(README, "| | requests at once | 1 |", 2)
MIXTURES = rows(CUDA, "| | N=1 | 4 | 16 | 64 | 256 |\n|---|---|---|---|---|---|\n| Qwen3-30B", 1)
VLLM = rows(CUDA, "| | N=1 | 4 | 16 | 64 | 256 |\n|---|---|---|---|---|---|\n| vLLM, bf16 |", 1)


def quire_on_h200(model: str) -> list[float]:
    """Output tokens a second of whole runs of 128 + 256 tokens, by the number of requests."""
    found = {
        int(number(receipt.settings, "requests") or 0): number(
            receipt.results, "output_tokens_per_second"
        )
        for receipt in gather([ROOT / "receipts" / "h200"])
        if receipt.kind == "throughput"
        and receipt.model["name"] == model
        and (receipt.settings["prompt_tokens"], receipt.settings["new_tokens"]) == (128, 256)
    }
    return [found[batch] or 0.0 for batch in BATCHES]


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("SmolLM2 135M Q4_1, two CPU cores", "smollm2 Q4_1 on cpu"),
        ("1B Llama shape Q4_K_M, two CPU cores", "dummy:llama-1b:Q4_K_M on cpu"),
    ],
)
def test_the_ratios_beside_llama_cpp_are_those_of_the_receipts(model: str, title: str) -> None:
    table = headline(gather([ROOT / "receipts"])).rows
    place = next(at for at, row in enumerate(table) if row[0] == title)
    (row,) = [row for row in table[place : place + 3] if row[1] == "times llama.cpp 0.3.36"]
    medians = [float(cell.split()[0]) for cell in row[2:]]
    assert SHOWN[model, "llama.cpp 0.3.36"] == [*medians, None]


@pytest.mark.parametrize(
    ("model", "quant", "rival", "shown"),
    [
        ("8B Llama shape Q4_K_M", "Q4_K_M", "vLLM, AWQ 4-bit (Marlin)", "vLLM 0.24, AWQ 4-bit"),
        ("8B Llama shape bf16", "BF16", "vLLM, bf16", "vLLM 0.24"),
        (
            *("8B Llama shape bf16", "BF16"),
            *("vLLM, bf16, batch-invariant", "vLLM 0.24, batch-invariant"),
        ),
    ],
)
def test_the_ratios_beside_vllm_are_quires_receipts_by_its_figures(
    model: str, quant: str, rival: str, shown: str
) -> None:
    ratios = [
        None if rate is None else round(own / rate, 2)
        for own, rate in zip(quire_on_h200(f"dummy:llama-8b:{quant}"), VLLM[(rival,)], strict=True)
    ]
    assert SHOWN[f"{model}, one H200", shown] == ratios
    below = list(VLLM).index((rival,)) + 1
    assert list(VLLM.values())[below] == ratios


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("Qwen3-30B-A3B's shape, Q4_K_M", "dummy:qwen3-30b-a3b:Q4_K_M"),
        ("gpt-oss-20b's shape, MXFP4", "dummy:gpt-oss-20b:MXFP4"),
    ],
)
def test_the_rates_of_mixtures_of_experts_are_those_of_the_receipts(title: str, model: str) -> None:
    assert MIXTURES[(title,)] == [round(rate) for rate in quire_on_h200(model)]
