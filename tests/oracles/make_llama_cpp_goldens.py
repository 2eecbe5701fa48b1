"""Makes tests/fixtures/bitnet-published/a/llama-cpp.npz: llama.cpp's logits of converted files.

Needs llama-cpp-python, which the tests do not; run it in an environment of its own:

    pip install llama-cpp-python==0.3.36
    python tests/oracles/make_llama_cpp_goldens.py FILE.gguf ... OUT.npz

The files are those of test_llama_cpp_runs_what_is_written (tests/model/test_conversion.py), which
says where it leaves them when their bytes change. For each file there is `STEM`, logits
[tokens, vocabulary], and `STEM.sha256`, the file that they are of; `tokens` and `version` beside.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found,unused-ignore]
import numpy as np

TOKENS = [7, 301, 44, 5, 260, 12, 399, 83, 83, 2, 190, 33, 61, 7, 7, 120]


def main(paths: list[Path], out: Path) -> None:
    found: dict[str, Any] = {"tokens": np.array(TOKENS), "version": llama_cpp.__version__}
    for path in paths:
        model = llama_cpp.Llama(
            str(path), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False
        )
        model.eval(TOKENS)
        found[path.stem] = np.array(model.scores[: len(TOKENS)], np.float32)
        found[f"{path.stem}.sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    np.savez_compressed(out, **found)


if __name__ == "__main__":
    *files, golden = map(Path, sys.argv[1:])
    main(files, golden)
