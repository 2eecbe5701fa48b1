"""Writes llama.cpp's logits of one GGUF file to an .npz; all is computed in float32.

Run by compare_with_llama_cpp.py with the interpreter that has llama-cpp-python.
"""

import sys

import llama_cpp  # type: ignore[import-not-found,unused-ignore]
import numpy as np

_FLOAT32 = 0  # of ggml's types: the KV cache's


def main(path: str, tokens_path: str, out: str) -> None:
    tokens = np.load(tokens_path)["tokens"].tolist()
    model = llama_cpp.Llama(
        path,
        n_ctx=64,
        n_batch=64,
        n_threads=1,
        logits_all=True,
        type_k=_FLOAT32,
        type_v=_FLOAT32,
        flash_attn=False,
        verbose=True,
    )
    model.eval(tokens)
    logits = np.array(model.scores[: len(tokens)], np.float32)
    np.savez_compressed(out, logits=logits, version=llama_cpp.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:4])
