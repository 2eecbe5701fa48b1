"""KV memory of models with windows: what `quire inspect` predicts is what a long context takes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.drawn_families import write_drawn

from quire import LLM, SamplingParams
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.request import Ended
from quire.engine.engine import Engine
from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.fake import FakeExecutor
from quire.executors.reference import ReferenceExecutor, kv_token_bytes
from quire.inspection import MemoryFacts, inspect_model
from quire.llm.devices import DEVICES, CudaDevice, Options
from quire.model.kv_layout import grouped, kv_bytes_in_block, one_group
from quire.model.loading import load_model

CONTEXT = 32_768
CHUNK = 256  # tokens of a step, as on the CPU
WINDOW = 512
GEMMA3_1B = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(26)]


def long_model(case: str, folder: Path, layer_types: list[str]) -> Path:
    """A narrow model of the family with these layers, and a long context."""
    write_drawn(case, folder, len(layer_types))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "max_position_embeddings": CONTEXT,
        "sliding_window": WINDOW,
        "layer_types": layer_types,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def predicted(folder: Path) -> MemoryFacts:
    found = inspect_model(str(folder), folder, trusted=True)
    assert found.memory is not None, found.problems
    return found.memory


def most_blocks(executor: Any, config: EngineConfig, *prompt_lengths: int) -> int:
    """The most blocks in use while prompts of so many tokens and a few more are computed: counted
    when a step is submitted, and those before it may not be collected."""
    engine = Engine(executor, config, clock=executor._clock)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for length in prompt_lengths:
        engine.add_request([1 + n * length % 50 for n in range(length)], params)
    used = []
    submit = executor.submit

    def counting(plan: StepPlan) -> object:
        used.append(engine.cache.pool.num_used)
        return submit(plan)

    executor.submit = counting
    events = list(engine.run())
    assert all(event.output.error is None for event in events if isinstance(event, Ended))
    executor.submit = submit
    return max(used)


def test_one_context_of_gemma3_takes_a_quarter_at_most_as_inspect_predicts(tmp_path: Path) -> None:
    """The engine's own blocks over an executor without a model: 26 layers as gemma3-1b's."""
    facts = predicted(long_model("gemma3", tmp_path, GEMMA3_1B))
    with load_model(tmp_path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        block_bytes = BLOCK_SIZE * kv_token_bytes(model.spec, layout)
        num_blocks = facts.kv_per_context // block_bytes
        # What the executor takes for as many blocks as were predicted, and no more are there.
        executor = ReferenceExecutor(model, num_blocks=num_blocks, layout=layout)
        assert executor.memory_bytes["kv"] == facts.kv_per_context
        assert executor.capacity.max_context == CONTEXT
        executor.close()
    fake = FakeExecutor(num_blocks=num_blocks, max_context=CONTEXT, windows=layout.windows)
    config = EngineConfig(max_batch_size=4, max_step_tokens=CHUNK, plan_ahead=False)
    used = most_blocks(fake, config, CONTEXT - 9) * block_bytes
    assert 0.95 * facts.kv_per_context <= used <= facts.kv_per_context
    assert facts.kv_without_windows == 4 * CONTEXT * model.spec.num_kv_elements
    assert used <= facts.kv_without_windows / 4


def test_it_takes_no_more_with_large_steps_that_are_planned_ahead(tmp_path: Path) -> None:
    """As on a GPU: two steps of 2,048 tokens. A second prompt fills what is left of them."""
    long_model("gemma3", tmp_path, GEMMA3_1B)
    with load_model(tmp_path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        block_size = layout.token_size(model.spec, lambda part: part.num_kv_elements)
    config = DEVICES["cuda"].engine_defaults
    assert config.plan_ahead and config.max_step_tokens == 2048
    fake = FakeExecutor(
        num_blocks=8192,
        max_context=CONTEXT,
        max_step_tokens=2048,
        windows=layout.windows,
        keep_plans=True,
    )
    used = most_blocks(fake, config, CONTEXT - 9) * block_size
    assert used <= CONTEXT // BLOCK_SIZE * model.spec.num_kv_elements / 4
    fake.plans.clear()
    most_blocks(fake, replace(config, max_batch_size=2), 4000, 4001)
    assert max(sum(row.num_new_tokens for row in plan.sequences) for plan in fake.plans) == 2048


def test_the_memory_that_a_long_context_needs_is_asked_for_and_no_more(tmp_path: Path) -> None:
    long_model("gemma3", tmp_path, GEMMA3_1B)
    with load_model(tmp_path) as model:
        plan = DEVICES["reference"].memory_plan(model, Options(max_batch_size=1))
        needed = plan.sequence_bytes(CONTEXT)
        assert needed < 4 * CONTEXT * model.spec.num_kv_elements / 5
        assert plan.longest_context(plan.num_blocks(needed, CONTEXT), CONTEXT) == CONTEXT
        with pytest.raises(ConfigError, match=f"max_context is {CONTEXT} tokens, which take"):
            plan.num_blocks(needed - plan.block_bytes, CONTEXT)
        with pytest.raises(ConfigError, match="for each of 7 groups of layers"):
            plan.check_batch(13, 2)


def test_a_long_context_runs_on_the_cpu_in_the_memory_predicted(tmp_path: Path) -> None:
    kinds = ["full_attention", *["sliding_attention"] * 7]
    facts = predicted(long_model("ministral", tmp_path, kinds))
    assert facts.cpu is not None
    assert facts.cpu.kv <= CONTEXT * facts.cpu.kv_per_token / 4
    prompt = [1 + n * n % 50 for n in range(6000)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(str(tmp_path), device="cpu", kv_memory=facts.cpu.kv, max_batch_size=1) as llm:
        assert llm._open.executor.capacity.max_context == CONTEXT
        assert llm._open.executor.memory_bytes["kv"] <= facts.cpu.kv
        windowed = llm.generate(prompt, params)[0]
    with load_model(tmp_path) as model:
        layout = one_group(model.spec)
        assert layout.windows == (None,)
    with LLM(
        str(tmp_path), device="cpu", kv_memory="64MiB", max_batch_size=1, max_context=6100
    ) as llm:
        again = llm.generate(prompt, params)[0]
    assert windowed.completions[0].token_ids == again.completions[0].token_ids


def test_the_gpus_plan_counts_groups_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "available_memory", lambda _: 1 << 40)
    long_model("gemma3", tmp_path, GEMMA3_1B)
    with load_model(tmp_path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        plan = DEVICES["cuda"].memory_plan(model, Options(device="cuda", max_batch_size=1))
        size = layout.token_size(model.spec, lambda part: part.num_kv_elements)
    assert plan.windows == layout.windows and plan.block_bytes == 2 * BLOCK_SIZE * size
    assert plan.sequence_bytes(CONTEXT) < 2 * CONTEXT * model.spec.num_kv_elements / 4
    with pytest.raises(ConfigError, match="for each of 7 groups of layers"):
        plan.check_batch(13, 2)


@pytest.mark.long
def test_a_whole_context_of_gemma3s_layers_holds_what_is_predicted_on_the_cpu(
    tmp_path: Path,
) -> None:
    facts = predicted(long_model("gemma3", tmp_path, GEMMA3_1B)).cpu
    assert facts is not None
    with load_model(tmp_path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        block_bytes = BLOCK_SIZE * kv_bytes_in_block(model.spec, layout, is_8bit=False)
        num_blocks, threads = facts.kv // block_bytes, Threads(2, may_spin=False)
        executor = CpuExecutor(model, num_blocks=num_blocks, threads=threads, layout=layout)
    config = EngineConfig(max_batch_size=1, max_step_tokens=CHUNK, plan_ahead=False)
    used = most_blocks(executor, config, CONTEXT - 9) * block_bytes
    executor.close()
    assert 0.95 * facts.kv <= used <= facts.kv
    assert used <= CONTEXT * facts.kv_per_token / 4


def test_rows_of_forward_batch_keep_every_block(tmp_path: Path) -> None:
    """They may go back to any position, so nothing of theirs is given back."""
    long_model("gemma3", tmp_path, GEMMA3_1B[:7])
    with LLM(str(tmp_path), device="reference", kv_memory="16MiB") as llm:
        tokens = [1 + n % 50 for n in range(40)]
        whole = llm.forward_batch([tokens])[0]
        again = llm.forward_batch([tokens[10:]], [10])[0]
    assert np.array_equal(whole[10:], again)
