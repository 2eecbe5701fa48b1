"""A llama_cpp for tests: its low-level calls, checked, over a "model" that adds numbers up.

The token after a sequence is the sum of its tokens, modulo the vocabulary. What llama.cpp would
refuse (too large a batch, a place left out, a sequence too many, a full context) is refused here.
"""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

VOCABULARY = 512
HIGHEST_COST = 4096  # tokens of context that this machine would have

print("llama_cpp says hello on standard output")  # which must not disturb the answers


def llama_backend_init() -> None:
    os.write(1, b"noise from C\n")


def llama_model_default_params() -> Any:
    return SimpleNamespace(n_gpu_layers=-1, use_extra_bufts=None)


def llama_model_load_from_file(path: bytes, params: Any) -> Any:
    assert params.n_gpu_layers in (0, 999)
    os.environ["FAKE_REPACKS"] = str(params.use_extra_bufts)  # for system_info to tell
    return SimpleNamespace() if os.path.exists(path) else None


def llama_model_get_vocab(model: Any) -> Any:
    return model


def llama_vocab_n_tokens(vocabulary: Any) -> int:
    return VOCABULARY


def llama_print_system_info() -> bytes:
    return f"CPU : FAKE = 1 | REPACKS = {os.environ['FAKE_REPACKS']}".encode()


def llama_context_default_params() -> Any:
    return SimpleNamespace(n_ctx=0, n_batch=0, n_seq_max=1, n_threads=0, n_threads_batch=0)


def llama_init_from_model(model: Any, params: Any) -> Any:
    assert params.n_threads == params.n_threads_batch > 0
    if params.n_ctx > HIGHEST_COST:
        return None
    return SimpleNamespace(params=params, sequences={}, logits={}, is_free=False)


def llama_free(context: Any) -> None:
    assert not context.is_free
    context.is_free = True


def llama_get_memory(context: Any) -> Any:
    return context


def llama_memory_clear(memory: Any, data: bool) -> None:
    memory.sequences.clear()


def llama_batch_init(size: int, embedding: int, max_sequences: int) -> Any:
    assert (embedding, max_sequences) == (0, 1)
    return SimpleNamespace(
        size=size,
        n_tokens=0,
        token=[None] * size,
        pos=[None] * size,
        n_seq_id=[None] * size,
        seq_id=[[None] for _ in range(size)],
        logits=[None] * size,
    )


def llama_batch_free(batch: Any) -> None:
    batch.size = 0


def llama_decode(context: Any, batch: Any) -> int:
    params = context.params
    if context.is_free or not 0 < batch.n_tokens <= min(batch.size, params.n_batch):
        return -1
    context.logits.clear()
    for row in range(batch.n_tokens):
        number = batch.seq_id[row][0]
        if batch.n_seq_id[row] != 1 or not 0 <= number < params.n_seq_max:
            return -1
        tokens = context.sequences.setdefault(number, [])
        if batch.pos[row] != len(tokens) or len(tokens) >= params.n_ctx // params.n_seq_max:
            return 1
        tokens.append(batch.token[row])
        if batch.logits[row]:
            context.logits[row] = sum(tokens) % VOCABULARY
    return 0


def llama_get_logits_ith(context: Any, row: int) -> Any:
    likeliest = context.logits[row]
    values = (ctypes.c_float * VOCABULARY)(*(float(n == likeliest) for n in range(VOCABULARY)))
    return ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
