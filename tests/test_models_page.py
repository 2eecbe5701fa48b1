"""docs/models.md lists what the registry holds: families, their files and devices; block formats.

After a family or a device changes, write its tables again:

    python -m tests.test_models_page
"""

import json
from pathlib import Path

from tests.drawn_families import CASES, DRAWN
from tests.fixture_files import FIXTURES

from quire.executors.cpu.native import native
from quire.model.config_spec import config_family, spec_from_config
from quire.model.families import FAMILIES, WITH_SENSES
from quire.model.features import LOWERED, Feature, features, unsupported
from quire.model.spec import ModelSpec
from quire.quant.formats import FORMATS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
FORMATS_BEGIN, FORMATS_END = "<!-- formats -->\n", "<!-- end of formats -->\n"


def fixtures() -> dict[str, list[Path]]:
    """By family: the models that are compared with transformers."""
    folders = [*(DRAWN / case for case in CASES), *sorted((FIXTURES / "families").iterdir())]
    found: dict[str, list[Path]] = {}
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        found.setdefault(config_family(config).name, []).append(folder)
    return dict(sorted(found.items()))


def specs() -> dict[str, list[ModelSpec]]:
    def read(folder: Path) -> ModelSpec:
        return spec_from_config(json.loads((folder / "config.json").read_text()))

    return {name: [read(folder) for folder in folders] for name, folders in fixtures().items()}


def oracles(folders: list[Path]) -> str:
    """What a family is compared with: transformers' goldens and llama.cpp's."""
    is_in_both = any((folder / "llama-cpp.npz").exists() for folder in folders)
    return "transformers, llama.cpp" if is_in_both else "transformers"


def families_table() -> str:
    devices = sorted(LOWERED)
    titles = ["family", "GGUF", "config.json", *devices, "checked against"]
    folders = fixtures()
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, models in specs().items():
        rows = [family for family in FAMILIES if family.name == name]
        architectures = [text for family in rows for text in family.architectures]
        types = [text for family in rows for text in family.model_types]
        types += [outer for outer, inner in WITH_SENSES.items() if inner in types]
        cells = [", ".join(f"`{x}`" for x in texts) or "-" for texts in (architectures, types)]
        for device in devices:
            runs = [not unsupported(spec, device) for spec in models]
            cells.append("yes" if all(runs) else "some" if any(runs) else "no")
        cells.append(oracles(folders[name]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def features_table() -> str:
    having: dict[Feature, dict[str, None]] = {}
    for name, models in specs().items():
        for spec in models:
            for feature, _ in features(spec):
                having.setdefault(feature, {})[name] = None
    lines = ["| what a model may have beyond a llama | devices | families |", "|---|---|---|"]
    for feature in Feature:
        devices = [device for device in sorted(LOWERED) if feature in LOWERED[device]]
        lines.append(
            f"| {feature} | {', '.join(devices)} | {', '.join(having.get(feature, '-'))} |"
        )
    return "\n".join(lines) + "\n"


def formats_table() -> str:
    """Block formats in ascending size, and what packing for the CPU makes of it."""
    lines = [
        "| format | GGUF type | bits a weight | on the CPU, times the file |",
        "|---|---|---|---|",
    ]
    for kind in sorted(FORMATS, key=lambda kind: kind.block_bytes / kind.block_size):
        size = 256 * 1024 // kind.block_size * kind.block_bytes
        grown = native.packed_bytes(kind.name, 256, 1024) / size
        bits = 8 * kind.block_bytes / kind.block_size
        number = kind.ggml_type if kind.ggml_type >= 0 else "-"
        lines.append(f"| {kind.name} | {number} | {bits:.4g} | {grown:.2f} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with today's tables."""
    page = _between(page, BEGIN, END, f"{families_table()}\n{features_table()}")
    return _between(page, FORMATS_BEGIN, FORMATS_END, formats_table())


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def test_the_page_lists_what_the_registry_holds() -> None:
    assert specs().keys() == {family.name for family in FAMILIES}, "each family has a golden"
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.test_models_page"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
