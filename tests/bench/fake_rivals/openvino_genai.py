"""An openvino_genai for tests: its next token is the sum of those before it, modulo 512."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

VOCABULARY = 512


class SchedulerConfig:
    max_num_batched_tokens = 256
    enable_prefix_caching = True


class GenerationConfig:
    max_new_tokens = 0
    ignore_eos = False
    do_sample = True


class Handle:
    """A request: its tokens, how many of them are computed, and what was not yet read of them."""

    def __init__(self, prompt: list[int], max_new_tokens: int) -> None:
        self.tokens = prompt
        self.num_computed = 0
        self.num_left = max_new_tokens
        self.unread: list[int] = []

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        assert self.unread
        found, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=found)}

    def compute(self, budget: int) -> int:
        count = min(budget, len(self.tokens) - self.num_computed)
        self.num_computed += count
        if count and self.num_computed == len(self.tokens):
            self.tokens.append(sum(self.tokens) % VOCABULARY)
            self.unread.append(self.tokens[-1])
            self.num_left -= 1
        return count


class ContinuousBatchingPipeline:
    def __init__(
        self, models_path: str, scheduler_config: Any, device: str, properties: dict[str, int]
    ) -> None:
        if not Path(models_path).exists():
            raise RuntimeError("could not load the model")
        assert device == "CPU"
        assert not scheduler_config.enable_prefix_caching
        assert properties["INFERENCE_NUM_THREADS"] > 0
        self._step_tokens = scheduler_config.max_num_batched_tokens
        self._live: list[Handle] = []

    def add_request(self, request_id: int, input_ids: Any, generation_config: Any) -> Handle:
        assert generation_config.ignore_eos and not generation_config.do_sample
        [prompt] = input_ids.data.tolist()
        self._live.append(Handle(prompt, generation_config.max_new_tokens))
        return self._live[-1]

    def has_non_finished_requests(self) -> bool:
        return bool(self._live)

    def step(self) -> None:
        """Whoever needs one token alone goes first."""
        budget = self._step_tokens
        for handle in sorted(self._live, key=lambda live: len(live.tokens) - live.num_computed):
            budget -= handle.compute(budget)
        self._live = [handle for handle in self._live if handle.num_left]
