"""Runs another engine in a process of its own, driven by lines of JSON.

    python rival_worker.py llama.cpp

    {"open": {"model": PATH, "threads": N, "use_gpu": false}}
                                                {"ready": {"version": TEXT, "about": TEXT}}
    {"run": {"prompts": [[ID, …], …], "new_tokens": N}}
                                                {"seconds": S, "prompt_s": S, "completion_s": S,
                                                 "tokens": [[ID, …], …]}

An answer may also be {"missing": PACKAGE} or {"error": TEXT}. The end of the input ends it. This
file needs the standard library and the engine alone, so that any interpreter that has the engine
can run it, with quire or without. Every run is greedy, all its sequences in one batch: all prompts
first, then a token for each at a time. prompt_s and completion_s are null where both were mixed.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import time
from typing import IO, Any, NamedTuple

_STEP_TOKENS = 2048  # of prompts, at a time: llama.cpp's own default; OpenVINO's is 256
_CONTEXT_UNIT = 256  # llama.cpp rounds a sequence's share of the cache to these


class Times(NamedTuple):
    """When a run began, had read its prompts, and ended; and the tokens of each sequence."""

    started: float
    prompts_read: "float | None"  # None: completions began before all prompts were read
    ended: float
    tokens: "list[list[int]]"


class LlamaCpp:
    """llama.cpp through the low-level half of its Python package, which takes whole batches."""

    package = "llama_cpp"
    distribution = "llama_cpp_python"

    def __init__(self, model: str, threads: int, use_gpu: bool, repack: bool = True) -> None:
        self._api: Any = importlib.import_module(self.package)
        self._numpy: Any = importlib.import_module("numpy")  # which the package needs itself
        self._threads, self._repack = threads, repack
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 999 if use_gpu else 0
        params.use_extra_bufts = repack
        self._model = self._api.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise RuntimeError("llama.cpp could not load the model")
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._num_logits = self._api.llama_vocab_n_tokens(vocabulary)
        self._context: Any = None
        self._shape = (0, 0)  # sequences and their length that the context is for

    @property
    def about(self) -> str:
        features = self._api.llama_print_system_info().decode(errors="replace").strip()
        how = "" if self._repack else "weights not repacked; "
        return f"{self._threads} threads; {how}{features}"

    def run(self, prompts: "list[list[int]]", new_tokens: int) -> Times:
        length = max(map(len, prompts)) + new_tokens
        self._fit(len(prompts), length)
        api, size = self._api, max(_STEP_TOKENS, len(prompts))
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        batch = api.llama_batch_init(size, 0, 1)
        try:
            return self._run(batch, size, prompts, new_tokens)
        finally:
            api.llama_batch_free(batch)

    def _run(self, batch: Any, size: int, prompts: "list[list[int]]", new_tokens: int) -> Times:
        rows = [
            (token, position, number, position == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        for start in range(0, len(rows), size):
            self._step(batch, rows[start : start + size], tokens)
        prompts_read = time.perf_counter()
        for step in range(new_tokens - 1):
            heads = [
                (tokens[number][-1], len(prompt) + step, number, True)
                for number, prompt in enumerate(prompts)
            ]
            self._step(batch, heads, tokens)
        return Times(started, prompts_read, time.perf_counter(), tokens)

    def _step(
        self, batch: Any, rows: "list[tuple[int, int, int, bool]]", tokens: "list[list[int]]"
    ) -> None:
        """Compute the rows; append the likeliest token to each sequence whose last row this is."""
        batch.n_tokens = len(rows)
        for row, (token, position, number, is_last) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
            batch.logits[row] = is_last
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code} for {len(rows)} tokens")
        for row, (_, _, number, is_last) in enumerate(rows):
            if is_last:
                pointer = self._api.llama_get_logits_ith(self._context, row)
                logits = self._numpy.ctypeslib.as_array(pointer, shape=(self._num_logits,))
                tokens[number].append(int(logits.argmax()))

    def _fit(self, num_sequences: int, length: int) -> None:
        """A context for just so many sequences: one for more would cost the smaller batches."""
        if self._shape == (num_sequences, length):
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        share = -(-length // _CONTEXT_UNIT) * _CONTEXT_UNIT
        params = self._api.llama_context_default_params()
        params.n_ctx = share * num_sequences
        params.n_batch = max(_STEP_TOKENS, num_sequences)
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {num_sequences} × {share} tokens")
        self._shape = (num_sequences, length)


class Transformers:
    """The transformers package: one forward pass for the prompts, one for each token after."""

    package = "transformers"
    distribution = "transformers"

    def __init__(self, model: str, threads: int, use_gpu: bool) -> None:
        package: Any = importlib.import_module(self.package)
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._device = "cuda" if use_gpu else "cpu"
        folder, file = os.path.split(model)
        if os.path.isdir(model):
            where, options = model, {}
        else:
            where, options = folder, {"gguf_file": file}
        loaded = package.AutoModelForCausalLM.from_pretrained(
            where, dtype="auto", local_files_only=True, **options
        )
        self._model = loaded.to(self._device).eval()

    @property
    def about(self) -> str:
        threads = self._torch.get_num_threads()
        return f"torch {self._torch.__version__}, {self._model.dtype}, {threads} threads"

    def run(self, prompts: "list[list[int]]", new_tokens: int) -> Times:
        torch = self._torch
        with torch.inference_mode():
            started = time.perf_counter()
            ids = torch.tensor(prompts, device=self._device)
            out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            heads = out.logits[:, -1].argmax(-1, keepdim=True)
            found = [heads.tolist()]  # which waits for a GPU to be done
            prompts_read = time.perf_counter()
            for _ in range(new_tokens - 1):
                cache = out.past_key_values
                out = self._model(input_ids=heads, past_key_values=cache, use_cache=True)
                heads = out.logits[:, -1].argmax(-1, keepdim=True)
                found.append(heads.tolist())
            ended = time.perf_counter()
        tokens = [[step[number][0] for step in found] for number in range(len(prompts))]
        return Times(started, prompts_read, ended, tokens)


class OpenVINO:
    """OpenVINO GenAI's pipeline for many requests, which plans its own steps."""

    package = "openvino_genai"
    distribution = "openvino-genai"

    def __init__(self, model: str, threads: int, use_gpu: bool) -> None:
        if use_gpu:
            raise RuntimeError("OpenVINO does not compute on this kind of GPU")
        self._package: Any = importlib.import_module(self.package)
        self._tensor: Any = importlib.import_module("openvino").Tensor
        self._numpy: Any = importlib.import_module("numpy")  # which the package needs itself
        self._threads = threads
        settings = self._package.SchedulerConfig()
        settings.max_num_batched_tokens = _STEP_TOKENS
        settings.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = self._package.ContinuousBatchingPipeline(
            model, settings, "CPU", properties
        )

    @property
    def about(self) -> str:
        return f"CPU, continuous batching, steps of {_STEP_TOKENS} tokens, {self._threads} threads"

    def run(self, prompts: "list[list[int]]", new_tokens: int) -> Times:
        config = self._package.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        tokens: list[list[int]] = [[] for _ in prompts]
        prompts_read = None
        is_apart = True
        started = time.perf_counter()
        handles = [
            self._pipeline.add_request(number, self._tensor(self._numpy.array([prompt])), config)
            for number, prompt in enumerate(prompts)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if prompts_read is None:
                _take(handles, tokens)
                is_apart = is_apart and max(map(len, tokens)) <= 1
                prompts_read = time.perf_counter() if all(tokens) else None
        ended = time.perf_counter()
        _take(handles, tokens)
        return Times(started, prompts_read if is_apart else None, ended, tokens)


def _take(handles: "list[Any]", tokens: "list[list[int]]") -> None:
    """What OpenVINO has written since it was last asked."""
    for handle, own in zip(handles, tokens):  # noqa: B905 (rivals may have an older Python)
        while handle.can_read():
            for output in handle.read().values():
                own.extend(output.generated_ids)


ENGINES: "dict[str, Any]" = {
    "llama.cpp": LlamaCpp,
    "openvino": OpenVINO,
    "transformers": Transformers,
}


def _answer(engines: "dict[str, Any]", name: str, line: str) -> "dict[str, Any]":
    """What one line asks for; `engines` holds the one that is open."""
    try:
        asked = json.loads(line)
        if "open" in asked:
            engine = engines[name] = ENGINES[name](**asked["open"])
            version = importlib.metadata.version(engine.distribution)
            return {"ready": {"version": version, "about": engine.about}}
        times = engines[name].run(**asked["run"])
    except ModuleNotFoundError as error:
        return {"missing": error.name or str(error)}
    except Exception as error:  # whatever goes wrong in there is reported
        return {"error": f"{type(error).__name__}: {error}"}
    prompts_read = times.prompts_read
    return {
        "seconds": times.ended - times.started,
        "prompt_s": None if prompts_read is None else prompts_read - times.started,
        "completion_s": None if prompts_read is None else times.ended - prompts_read,
        "tokens": times.tokens,
    }


def _private_output() -> "IO[str]":
    """Standard output for answers alone: what the engine prints goes to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def main(name: str) -> None:
    output = _private_output()
    engines: dict[str, Any] = {}
    for line in sys.stdin:
        output.write(json.dumps(_answer(engines, name, line)) + "\n")
        output.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its neighbours are not packages of the engine's
    main(sys.argv[1])
