"""What only a GPU can show, as a script for a machine that has one and little else:

    PYTHONPATH=src python tests/executors/cuda/on_gpu.py tiny FOLDER    errors over fixtures/tiny
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py same MODEL     tokens and KV in any company
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py mixed MODEL    scores and vectors likewise
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py constrained MODEL   tokens held to schemas
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py full MODEL     the most demanding requests
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py soak MODEL     random requests for minutes
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py kl MODEL       beside the float32 reference
    PYTHONPATH=src:. python tests/executors/cuda/on_gpu.py families FOLDER   beside the reference
    PYTHONPATH=src:. python tests/executors/cuda/on_gpu.py long MODEL     700 tokens, likewise
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py cost MODEL     what batch invariance costs
    PYTHONPATH=src python tests/executors/cuda/on_gpu.py busy MODEL     the GPU's share of the time

A third argument, fp8 or int8, is the type of the KV cache (same, mixed, full, kl).
FOLDER holds the GGUF files and golden.npz, of families one folder each (tests/fixtures/families or
drawn); kl's MODEL is SmolLM2, whose chats it follows; long's is small, such as dummy:tiny-gemma3.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from quire.core.config import EngineConfig
from quire.core.plan import NO_BLOCK, NO_STATE, SequencePlan, StepPlan, Want
from quire.core.request import Ended
from quire.core.sampling import Constraint, SamplingParams
from quire.engine.engine import Engine
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.reference import KVPrecision, ReferenceExecutor
from quire.llm.assembly import Assembly, assemble
from quire.llm.devices import Options
from quire.model.features import unsupported
from quire.model.kv_layout import grouped, one_group
from quire.model.loading import load_model
from quire_bench.measure import Load, run_load
from quire_bench.row_kinds import own_schema
from quire_bench.traffic import with_words

BLOCK_FORMATS = (
    *("Q4_K_M", "Q6_K", "Q5_K_M", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M"),
    *("IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"),
)
FLOAT_FORMATS = ("BF16", "F16")
BATCHES = (1, 2, 7, 16, 64, 256)
KL_LIMIT = 3.5e-3
COST_LIMIT = 1.2
BUSY_LIMIT = 0.8


def executor_for(name: str | Path, blocks: int, *, groups: bool = True, **sizes: Any) -> Any:
    """With so many blocks for each group of layers, or one group, and states for a full batch."""
    with load_model(name) as model:
        layout = grouped(model.spec, BLOCK_SIZE) if groups else one_group(model.spec)
        kv_type: Any = sys.argv[3] if len(sys.argv) > 3 else "auto"
        sizes["num_states"] = 4 * sizes["max_batch_size"] + 8
        config = CudaConfig(num_blocks=blocks * len(layout.windows), kv_type=kv_type, **sizes)
        found = CudaExecutor(model, config, layout=layout)
    found.warm_up()
    return found


# ---- fixtures/tiny


def check_tiny(folder: Path) -> bool:
    golden = np.load(folder / "golden.npz")
    is_sound = True
    for name in (*BLOCK_FORMATS, *FLOAT_FORMATS):
        if not (folder / f"{name}.gguf").exists():
            print(f"{name:8} no file")
            continue
        executor = executor_for(folder / f"{name}.gguf", 64, max_batch_size=32, max_step_tokens=64)
        tokens = tuple(int(token) for token in golden["tokens"])
        plan = SequencePlan(0, 0, tokens, None, (3, 1), Want.LOGITS)
        [result] = executor.collect(executor.submit(StepPlan(0, (plan,)))).sequences
        executor.close()
        error = nmse(result.logits, golden[f"{name}.exact"])
        peer = nmse(golden[f"{name}.peer"], golden[f"{name}.exact"])
        limit = 2e-4 if name in FLOAT_FORMATS else 1.1 * peer + 1e-6
        is_sound &= error <= limit
        print(f"{name:8} error {error:.3e}  peer {peer:.3e}  limit {limit:.3e}  {error <= limit}")
    return is_sound


def nmse(found: Any, exact: Any) -> float:
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


# ---- the same tokens in any company


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Of many lengths; every fourth begins like the one before it."""
    rng = np.random.default_rng(3)
    made: list[list[int]] = []
    for place in range(count):
        own = rng.integers(0, vocabulary, int(rng.integers(1, 200))).tolist()
        made.append(made[-1][:48] + own if place % 4 == 3 else own)
    return made


def generated(
    executor: CudaExecutor, asked: Sequence[list[int]], config: EngineConfig
) -> Mapping[int, tuple[int, ...]]:
    engine = Engine(executor, config)
    places = {}
    for place, prompt in enumerate(asked):
        temperature = 0.8 if place % 3 == 0 else 0.0
        params = SamplingParams(
            max_tokens=24, temperature=temperature, seed=place, top_p=0.9, ignore_eos=True
        )
        places[engine.add_request(prompt, params).id] = place
    found: dict[int, tuple[int, ...]] = {}
    for event in engine.run():
        if isinstance(event, Ended):
            assert event.output.error is None, event.output.error
            found[places[event.output.request_id]] = tuple(event.output.token_ids)
    return found


def check_same(name: str) -> bool:
    executor = executor_for(name, 8192, max_batch_size=256, max_step_tokens=2048)
    asked = prompts(256, executor.capacity.vocabulary_size)
    usual = EngineConfig(max_batch_size=256, max_step_tokens=2048)
    runs = {f"batch {size}": replace(usual, max_batch_size=size) for size in BATCHES}
    runs["chunks of 256"] = replace(usual, max_step_tokens=256)
    runs["chunks of 300"] = replace(usual, max_step_tokens=300)
    runs["no prefixes"] = replace(usual, prefix_reuse=False)
    runs["no plan ahead"] = replace(usual, plan_ahead=False)
    expected = generated(executor, asked, usual)
    is_sound = len(expected) == len(asked)
    if any(executor.capacity.windows):
        whole = executor_for(name, 8192, groups=False, max_batch_size=256, max_step_tokens=2048)
        found = generated(whole, asked, usual)
        whole.close()
        is_sound &= found == expected
        print(f"{'one table':16} {'same' if found == expected else 'DIFFERS'}", flush=True)
    for label, config in runs.items():
        few = asked if config.max_batch_size > 2 else asked[:24]
        found = generated(executor, few, config)
        wrong = [place for place in found if found[place] != expected[place]]
        is_sound &= not wrong and len(found) == len(few)
        print(f"{label:16} {len(found)} requests, {len(wrong)} differ", flush=True)
    return is_sound & check_kv(executor)


def check_kv(executor: CudaExecutor) -> bool:
    """Keys, values and the state of one prompt, computed whole and in chunks of several sizes."""
    tokens = tuple(np.random.default_rng(5).integers(0, 500, 300).tolist())
    count = -(-len(tokens) // 16)
    groups = len(executor.capacity.windows)
    tables = {
        size: group_tables(count, groups, at * count * groups)
        for at, size in enumerate((300, 1, 7, 64))
    }
    states: dict[int, tuple[int, ...]] = {}
    for at, (size, own) in enumerate(tables.items()):
        for step, start in enumerate(range(0, len(tokens), size)):
            states[size] = slots_of(executor, step, 2 * at)
            chunk = tokens[start : start + size]
            plan = planned(start, chunk, own, Want.NOTHING, states[size])
            executor.collect(executor.submit(StepPlan(0, (plan,))))
    whole, *others = tables.values()
    blocks = executor._blocks
    last = len(tokens) // 16  # full blocks
    same = all(
        kept[:, list(table[:last])].equal(kept[:, list(first[:last])])
        for kept in blocks.arrays
        for own in others
        for table, first in zip(own, whole, strict=True)
    )
    print(f"keys and values of chunks of {list(tables)}: {'same bytes' if same else 'DIFFER'}")
    return bool(same) & check_states(executor, states)


def check_states(executor: CudaExecutor, slots: Mapping[int, tuple[int, ...]]) -> bool:
    """The states that chunks of each size left, in these slots."""
    if not executor.capacity.num_states:
        return True
    whole, *others = (target for _, target in slots.values())
    same = all(
        kept[target].equal(kept[whole])
        for layer in executor._decoder.states.layers.values()
        for kept in (layer.kept, layer.matrices)
        for target in others
    )
    print(f"states of chunks of {list(slots)}: {'same bytes' if same else 'DIFFER'}")
    return same


def slots_of(executor: CudaExecutor, step: int, first: int) -> tuple[int, ...]:
    """Of a sequence's row, its `step`th: two slots from `first` on are read and written in turn."""
    if not executor.capacity.num_states:
        return ()
    return first + (step - 1) % 2 if step else NO_STATE, first + step % 2


def group_tables(count: int, groups: int, first: int = 0) -> list[tuple[int, ...]]:
    """Of each group a table of so many blocks, from block `first` on."""
    starts = [first + group * count for group in range(groups)]
    return [tuple(range(start, start + count)) for start in starts]


def planned(
    start: int,
    tokens: tuple[int, ...],
    tables: Sequence[tuple[int, ...]],
    want: Want,
    states: tuple[int, ...] = (),
) -> SequencePlan:
    others = tuple(tables[1:])
    return SequencePlan(0, start, tokens, None, tables[0], want, other_tables=others, states=states)


# ---- the same scores and vectors in any company


def mixed_requests(vocabulary: int) -> list[tuple[list[int], SamplingParams, bool]]:
    """42 of 3 to 4,000 prompt tokens: greedy, sampled, scored, forked, penalised, pooled."""
    rng = np.random.default_rng(11)
    made: list[tuple[list[int], SamplingParams, bool]] = []
    for place in range(42):
        length = int(np.exp(rng.uniform(np.log(3), np.log(4000))))
        prompt = rng.integers(0, vocabulary, length).tolist()
        params = SamplingParams(
            max_tokens=12,
            temperature=(0.0, 0.8, 1.3)[place % 3],
            seed=place,
            top_p=(1.0, 0.9)[place % 2],
            top_k=(0, 50)[place % 5 == 0],
            repetition_penalty=(1.0, 1.1)[place % 4 == 1],
            frequency_penalty=(0.0, 0.5)[place % 4 == 2],
            n=(1, 3)[place % 7 == 3],
            logprobs=(0, 5, 20)[place % 3],
            prompt_logprobs=(None, 3)[place % 6 == 1],
            ignore_eos=True,
        )
        made.append((prompt, params, place % 8 == 7))
    return made


def mixed_outputs(
    executor: CudaExecutor,
    asked: Sequence[tuple[list[int], SamplingParams, bool]],
    config: EngineConfig,
) -> dict[int, Any]:
    """Of each request everything that it got, as it compares bit for bit."""
    engine = Engine(executor, config)
    places = {}
    for place, (prompt, params, pooling) in enumerate(asked):
        own = SamplingParams(max_tokens=1) if pooling else params
        places[engine.add_request(prompt, own, pooling=pooling).id] = place
    found: dict[int, Any] = {}
    for event in engine.run():
        if isinstance(event, Ended):
            output = event.output
            assert output.error is None, output.error
            pooled = None if output.pooled is None else np.asarray(output.pooled).tobytes()
            completions = [(tuple(c.token_ids), repr(c.logprobs)) for c in output.completions]
            found[places[output.request_id]] = {
                "tokens": [tokens for tokens, _ in completions],
                "logprobs": [scores for _, scores in completions],
                "prompt logprobs": repr(output.prompt_logprobs),
                "pooled": pooled,
            }
    return found


def check_mixed(name: str) -> bool:
    executor = executor_for(name, 16384, max_batch_size=64, max_step_tokens=2048)
    asked = mixed_requests(executor.capacity.vocabulary_size)
    usual = EngineConfig(max_batch_size=64, max_step_tokens=2048)
    expected = mixed_outputs(executor, asked, usual)
    runs = {
        "batch 7": replace(usual, max_batch_size=7),
        "chunks of 300": replace(usual, max_step_tokens=300),
        "no prefixes": replace(usual, prefix_reuse=False),
        "no plan ahead": replace(usual, plan_ahead=False),
    }
    is_sound = len(expected) == len(asked)
    for label, config in runs.items():
        is_sound &= _same(label, mixed_outputs(executor, asked, config), expected)
    alone = {}
    for place in range(0, len(asked), 4):
        [alone[place]] = mixed_outputs(executor, asked[place : place + 1], usual).values()
    return is_sound & _same("alone", alone, expected)


def _same(label: str, found: Mapping[int, Any], expected: Mapping[int, Any]) -> bool:
    differ = {
        what: sum(found[place][what] != expected[place][what] for place in found)
        for what in ("tokens", "logprobs", "prompt logprobs", "pooled")
    }
    print(f"{label:16} {len(found)} requests; differ: {differ}", flush=True)
    return not any(differ.values())


# ---- the same tokens under constraints


def check_constrained(name: str) -> bool:
    """Needs llguidance. Of 24 requests two thirds are held to a schema of their own."""
    assembly = assemble(name, Options(device="cuda", max_batch_size=24, kv_memory="1GiB"))
    params = [
        SamplingParams(
            max_tokens=64,
            temperature=(0.0, 0.9)[place % 2],
            seed=place,
            top_p=0.95,
            repetition_penalty=(1.0, 1.1)[place % 5 == 1],
            ignore_eos=True,
            structured=Constraint("json_schema", own_schema(place, 8)) if place % 3 else None,
        )
        for place in range(24)
    ]
    assembly = with_words(assembly)
    asked = list(enumerate(zip(prompts(24, assembly.spec.vocabulary_size), params, strict=True)))
    expected = _constrained(assembly, asked)
    is_sound = len(expected) == len(asked)
    for size in (16, 5, 1):
        found = _constrained(assembly.with_batch_size(size), asked)
        wrong = [place for place in found if found[place] != expected[place]]
        is_sound &= not wrong and len(found) == len(asked)
        print(f"batch {size:2} {len(found)} requests, {len(wrong)} differ", flush=True)
    assembly.executor.close()
    return is_sound


def _constrained(
    assembly: Assembly, asked: Sequence[tuple[int, tuple[list[int], SamplingParams]]]
) -> dict[int, tuple[int, ...]]:
    engine = assembly.new_engine()
    places = {engine.add_request(*request).id: place for place, request in asked}
    found = {}
    for event in engine.run():
        if isinstance(event, Ended):
            assert event.output.error is None, event.output.error
            found[places[event.output.request_id]] = tuple(event.output.token_ids)
    return found


# ---- the most demanding requests, with the memory that is there by default


def check_full(name: str) -> bool:
    assembly = assemble(name, Options(device="cuda", max_batch_size=256))
    is_sound = True
    loads = {
        "sampled": {},
        "top-k, top-p, min-p, penalties": _EVERY_OPTION,
        "with 20 logprobs": _EVERY_OPTION | {"logprobs": 20},
        "with prompt logprobs": _EVERY_OPTION | {"logprobs": 20, "prompt_logprobs": 20},
        "n = 4": _EVERY_OPTION | {"logprobs": 5, "n": 4},
    }
    for label, options in loads.items():
        is_sound &= _run_full(assembly, label, options)
    held = {key: f"{size / 2**30:.2f}" for key, size in assembly.executor.memory_bytes.items()}
    print(f"GiB held: {held}")
    assembly.executor.close()
    return is_sound


_EVERY_OPTION: dict[str, Any] = {
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {5: 1.0},
    "min_tokens": 4,
}


def _run_full(assembly: Any, label: str, options: Mapping[str, Any]) -> bool:
    engine = assembly.new_engine()
    vocabulary = assembly.spec.vocabulary_size
    rng = np.random.default_rng(4)
    for seed in range(256):
        prompt = rng.integers(0, vocabulary, 129).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=32, seed=seed, **options))
    started, tokens, errors = time.perf_counter(), 0, []
    for event in engine.run():
        if isinstance(event, Ended):
            tokens += sum(len(c.token_ids) for c in event.output.completions)
            if event.output.error is not None:
                errors.append(event.output.error)
    faults = dict(engine.stats.faults_isolated)
    rate = tokens / (time.perf_counter() - started)
    print(
        f"{label:32} {len(errors)} of 256 failed, faults {faults}, {rate:.0f} tokens/s", flush=True
    )
    for error in errors[:1]:
        print(f"    {error!r:.300}")
    return not errors and not faults


# ---- random requests for minutes, with the memory that is there by default

SOAK_S = 60.0


def random_params(rng: np.random.Generator, seed: int) -> SamplingParams:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return SamplingParams(
        max_tokens=int(rng.integers(1, 200)),
        seed=seed,
        ignore_eos=True,
        temperature=one_of(0.0, 0.7, 1.0, 1.5),
        top_k=one_of(0, 0, 50, 5000),
        top_p=one_of(1.0, 0.95, 0.5),
        min_p=one_of(0.0, 0.0, 0.05),
        repetition_penalty=one_of(1.0, 1.1),
        frequency_penalty=one_of(0.0, 0.5),
        repeat_last_n=one_of(None, None, 64),
        logit_bias=one_of({}, {5: 1.0}),
        logprobs=one_of(None, None, 0, 5, 20),
        prompt_logprobs=one_of(None, None, None, 20),
        n=one_of(1, 1, 1, 4),
        typical_p=one_of(1.0, 1.0, 1.0, 1.0, 0.9),
        xtc_probability=one_of(0.0, 0.0, 0.0, 0.0, 0.5),
        dry_multiplier=one_of(0.0, 0.0, 0.0, 0.8),
        dry_sequence_breakers=(),
    )


def check_soak(name: str) -> bool:
    """Whether every one of many random requests ends well, with a queue that is never empty."""
    assembly = assemble(name, Options(device="cuda"))
    engine = assembly.new_engine()
    vocabulary = assembly.spec.vocabulary_size
    rng = np.random.default_rng(8)
    started, added, ended, tokens, errors = time.perf_counter(), 0, 0, 0, []
    is_over = False
    while not is_over or ended < added:
        is_over = is_over or time.perf_counter() - started > SOAK_S
        while not is_over and added - ended < 96:
            prompt = rng.integers(0, vocabulary, int(np.exp(rng.uniform(1, 7)))).tolist()
            engine.add_request(prompt, random_params(rng, added))
            added += 1
        for event in engine.step():
            if isinstance(event, Ended):
                ended += 1
                tokens += sum(len(c.token_ids) for c in event.output.completions)
                if event.output.error is not None:
                    errors.append(event.output.error)
    faults = dict(engine.stats.faults_isolated)
    seconds = time.perf_counter() - started
    print(f"{added} requests, {tokens} tokens in {seconds:.0f} s; {len(errors)} failed, {faults}")
    for error in errors[:1]:
        print(f"    {error!r:.300}")
    assembly.executor.close()
    return not errors and not faults


# ---- families


def check_families(folder: Path) -> bool:
    from tests.drawn_families import in_its_context, write_drawn
    from tests.executors.cuda.bfloat_models import load_in_bfloat

    is_sound = True
    tokens = tuple(np.random.default_rng(8).integers(0, 60, 40).tolist())
    for path in sorted(folder.iterdir()):
        is_drawn = (path / "tensors.json").exists()
        with tempfile.TemporaryDirectory() as made:
            written = write_drawn(path.name, Path(made)) if is_drawn else path
            with load_in_bfloat(written) as model:
                model = in_its_context(path.name, model)
                if path.name != "bitnet" and not unsupported(model.spec, "cuda"):
                    is_sound &= _beside_reference(path.name, model, tokens)
    return is_sound


def check_long(name: str) -> bool:
    with load_model(name) as model:
        tokens = tuple(np.random.default_rng(8).integers(0, 500, 700).tolist())
        return _beside_reference(name, model, tokens)


def _beside_reference(name: str, model: Any, tokens: tuple[int, ...]) -> bool:
    """Logits of a prompt, whole and but for its last eight tokens, which then come one by one,
    after what is out of their windows was written over."""
    from tests.executors.cuda.half_reference import operands_in_halves

    count, layout = len(tokens), grouped(model.spec, BLOCK_SIZE)
    tables = group_tables(-(-count // BLOCK_SIZE), len(layout.windows))
    sizes = CudaConfig(8, count, num_blocks=sum(map(len, tables)))
    with patch("quire.executors.cuda.graphs._SIZES", (8, 4096)):  # few graphs to capture
        executor = CudaExecutor(model, sizes, layout=layout)
        executor.warm_up()
    asked = planned(0, tokens, tables, Want.LOGITS, slots_of(executor, 0, 0))
    [found] = executor.collect(executor.submit(StepPlan(0, (asked,)))).sequences
    if executor.capacity.num_states:
        before = planned(0, tokens[:-8], tables, Want.NOTHING, slots_of(executor, 0, 2))
        executor.collect(executor.submit(StepPlan(0, (before,))))
    for group, window in enumerate(layout.windows):
        first = 0 if window is None else window.first_seen(count - 8) // BLOCK_SIZE
        freed = list(tables[group][:first])
        executor._blocks.keys[:, freed] = executor._blocks.values[:, freed] = float("nan")
        tables[group] = (NO_BLOCK,) * first + tables[group][first:]
    single = []
    for place in range(count - 8, count):
        states = slots_of(executor, place - count + 9, 2)
        own = planned(place, tokens[place : place + 1], tables, Want.LOGITS, states)
        [result] = executor.collect(executor.submit(StepPlan(1, (own,)))).sequences
        single.append(result.logits[0])
    executor.close()
    table = tuple(range(-(-count // 16)))
    plan = StepPlan(0, (planned(0, tokens, [table], Want.LOGITS, asked.states),))
    exact = _reference_logits(model, plan, "float32")
    with operands_in_halves():
        rounded = _reference_logits(model, plan, "bfloat16")
    error, noise = nmse(found.logits, exact), nmse(rounded, exact)
    same = all(np.array_equal(a, b) for a, b in zip(single, found.logits[-8:], strict=True))
    limit = 2 * noise + 2e-4  # as much as what is rounded explains: a router's choice may change
    bits = "same" if same else "DIFFER"
    print(f"{name:26} error {error:.2e}  limit {limit:.2e}  alone: bits {bits}", flush=True)
    return same and error < limit


def _reference_logits(model: Any, plan: StepPlan, precision: KVPrecision) -> Any:
    [row] = plan.sequences
    reference = ReferenceExecutor(
        model,
        num_blocks=len(row.block_table),
        max_step_tokens=len(row.tokens),
        kv_precision=precision,
    )
    return reference.collect(reference.submit(plan)).sequences[0].logits


# ---- along SmolLM2's chats


def chats() -> list[tuple[tuple[int, ...], int]]:
    """Tokens of each chat with its float32 completion, and where the completion starts."""
    golden = Path(__file__).parents[2] / "fixtures" / "smollm2" / "golden.json"
    return [
        ((*chat["prompt_tokens"], *chat["greedy_f32"]), len(chat["prompt_tokens"]))
        for chat in json.loads(golden.read_text())["chats"]
    ]


def reference_logprobs(task: tuple[str, int]) -> Any:
    """The reference executor's log-probabilities over one chat's completion."""
    name, place = task
    tokens, start = chats()[place]
    with load_model(name) as model:
        executor = ReferenceExecutor(model, num_blocks=64)
    found = logprobs_along(executor, tokens, start)
    executor.close()
    return found


def logprobs_along(executor: Any, tokens: tuple[int, ...], start: int) -> Any:
    plan = SequencePlan(0, 0, tokens, None, tuple(range(-(-len(tokens) // 16))), Want.LOGITS)
    [result] = executor.collect(executor.submit(StepPlan(0, (plan,)))).sequences
    assert result.fault is None, result.fault
    logits = result.logits[start - 1 : -1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check_kl(name: str) -> bool:
    tasks = [(name, place) for place in range(len(chats()))]
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        exact = pool.map(reference_logprobs, tasks, 1)
    executor = executor_for(name, 256, max_batch_size=64, max_step_tokens=1024)
    found = [logprobs_along(executor, *chat) for chat in chats()]
    each = np.concatenate(
        [(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(exact, found, strict=True)]
    )
    pairs = zip(exact, found, strict=True)
    agreed = np.concatenate([p.argmax(axis=1) == q.argmax(axis=1) for p, q in pairs])
    mean = float(each.mean())
    print(
        f"mean KL {mean:.2e} over {len(each)} positions (limit {KL_LIMIT:.1e}), 99th percentile "
        f"{np.percentile(each, 99):.2e}, same top token {agreed.mean():.4f}"
    )
    return mean <= KL_LIMIT


# ---- what invariance costs


def check_cost(name: str) -> bool:
    """Whole runs and prompts alone, with one order of summation and without."""
    loads = {"256 x (128 + 64)": Load(256, 128, 64), "64 x 512 prompts": Load(64, 512, 1)}
    seconds: dict[bool, list[float]] = {}
    for invariant in (True, False):
        options = Options(device="cuda", max_batch_size=256, kv_memory="16GiB", invariant=invariant)
        assembly = assemble(name, options)
        runs = [
            [run_load(assembly, load, seed).seconds for seed in range(3)] for load in loads.values()
        ]
        seconds[invariant] = [min(each[1:]) for each in runs]
        assembly.executor.close()
    is_sound = True
    for place, label in enumerate(loads):
        kept, free = seconds[True][place], seconds[False][place]
        is_sound &= kept <= COST_LIMIT * free
        print(f"{label}: {kept:.3f} s, without {free:.3f} s: costs {kept / free - 1:+.1%}")
    return is_sound


# ---- how busy the GPU is


def check_busy(name: str) -> bool:
    """From a timeline of every kernel and copy of a run, which the recording itself slows."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    assembly = assemble(name, Options(device="cuda", max_batch_size=256, kv_memory="16GiB"))
    is_sound = True
    for count in (1, 4, 16, 64, 256):
        own = assembly.with_batch_size(count)
        run_load(own, Load(count, 128, 32), 1)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            seconds = run_load(own, Load(count, 128, 256), 2).seconds
            torch.cuda.synchronize()
        spans = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in recorded.profiler.kineto_results.events()
            if "CUDA" in str(event.device_type())
        )
        busy, end = 0, 0
        for start, stop in spans:
            busy += max(0, stop - max(start, end))
            end = max(end, stop)
        share = busy / 1e9 / seconds
        is_sound &= share >= BUSY_LIMIT or count < 4
        print(f"N={count:<4} {len(spans)} kernels and copies, busy {share:.1%} of {seconds:.3f} s")
    return is_sound


def main(arguments: Sequence[str]) -> int:
    what, where = arguments[:2]
    checks = {"tiny": lambda: check_tiny(Path(where)), "same": lambda: check_same(where)}
    checks["mixed"] = lambda: check_mixed(where)
    checks["constrained"] = lambda: check_constrained(where)
    checks["full"] = lambda: check_full(where)
    checks["soak"] = lambda: check_soak(where)
    checks["kl"] = lambda: check_kl(where)
    checks["cost"] = lambda: check_cost(where)
    checks["busy"] = lambda: check_busy(where)
    checks["long"] = lambda: check_long(where)
    checks["families"] = lambda: check_families(Path(where))
    is_sound = checks[what]()
    print("sound" if is_sound else "NOT SOUND")
    return 0 if is_sound else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
