"""Extreme small shapes with real steps on a GPU, beside the reference executor's logits:

    PYTHONPATH=src:. python tests/executors/cuda/extreme_shapes.py [--first 0] [--seconds 540]

Shape after shape until the time is over; each has kernels of its own to compile. Ends with a line
that says how many shapes ran, how many steps, what was refused, and where to go on. Status 1 where
something differed from the reference, depended on its chunks, or raised what it should not.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np
from tests.extreme_models import random_model, small_spec

from quire.core.errors import UnsupportedModelError
from quire.core.plan import Sampling, SequencePlan, StepPlan, Want
from quire.core.sampling import SamplingParams
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model
from quire.model.rope import Rope

FORMATS = ("BF16", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
# Relative squared error beside float32: of bfloat16 keys and values, and of float16 operands.
LIMIT = 2e-3
GREEDY = Sampling(SamplingParams(temperature=0.0, logprobs=3), seed=0, index=0)
DRAWN = Sampling(SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.01), seed=7, index=1)


def shape_of(number: int) -> tuple[dict[str, Any], str]:
    """Sizes at and around what kernels are cut by."""
    rng = np.random.default_rng(number)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    sizes = (2, 4, 6, 8, 14, 16, 18, 30, 32, 34, 64, 64, 66, 80, 96, 128, 128, 130, 192, 256)
    head_dim = pick(*sizes, 258, 512)
    kv_heads = pick(1, 1, 2, 3, 5, 8)
    groups = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128, 129, 256)
    num_layers = pick(1, 1, 2, 3)
    dims = 2 * int(rng.integers(1, head_dim // 2 + 1))
    fields = {
        "hidden_size": pick(1, 2, 31, 32, 33, 255, 256, 257, 512, 1000, 2304),
        "ffn_size": pick(1, 8, 31, 33, 255, 256, 257, 640),
        "num_layers": num_layers,
        "num_heads": kv_heads * pick(*groups),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocabulary_size": pick(2, 15, 16, 17, 127, 129, 8191, 8193),
        "context_length": pick(2, 17, 100, 600, 1100),
        "norm_epsilon": pick(1e-12, 1e-6, 1e-5, 1.0),
        "rope": Rope(pick(1.5, 1e4, 1e12), pick(dims, head_dim), interleaved=bool(pick(0, 1))),
        "windows": tuple(pick(None, None, 1, 17, 511, 512, 513) for _ in range(num_layers)),
        "qkv_bias": bool(pick(0, 0, 1)),
        "output_bias": bool(pick(0, 0, 1)),
        "ffn_bias": bool(pick(0, 0, 1)),
        "qk_norm": bool(pick(0, 0, 1)),
        "tied_head": bool(pick(0, 1)),
    }
    return fields, pick(*FORMATS)


def made(number: int) -> Model:
    """Matrices whose rows do not fill a format's blocks, and those of F32, are in BF16."""
    sizes, usual = shape_of(number)
    spec = small_spec(**sizes)
    per_row = {"Q8_0": 32, "Q4_0": 32, "Q4_K": 256, "Q6_K": 256}.get(usual, 1)
    inner = {
        "attn_q": spec.hidden_size,
        "attn_k": spec.hidden_size,
        "attn_v": spec.hidden_size,
        "attn_output": spec.query_size,
        "ffn_gate": spec.hidden_size,
        "ffn_up": spec.hidden_size,
        "ffn_down": spec.ffn_size,
        "output": spec.hidden_size,
        "token_embd": spec.hidden_size,
    }
    formats = {name: usual if size % per_row == 0 else "BF16" for name, size in inner.items()}
    return random_model(spec, number, formats, "BF16")


class Steps:
    """One executor's answers to the same plans."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.count = 0

    def run(self, *rows: SequencePlan) -> Any:
        self.count += 1
        ticket = self._executor.submit(StepPlan(self.count, rows))
        return self._executor.collect(ticket, 300).sequences


def logits_of(steps: Steps, tokens: tuple[int, ...], chunk: int) -> Any:
    """Of every token; None where the rows are faults."""
    table = tuple(range(len(tokens) // 16 + 1))
    parts = []
    for start in range(0, len(tokens), chunk):
        plan = SequencePlan(0, start, tokens[start : start + chunk], None, table, Want.LOGITS)
        [result] = steps.run(plan)
        if result.fault is not None:
            return None
        parts.append(np.asarray(result.logits))
    return np.concatenate(parts)


def problems_of(model: Model, number: int) -> tuple[list[str], int]:
    spec, rng = model.spec, np.random.default_rng(number + 1)
    length = min(spec.context_length, int(rng.choice([1, 2, 16, 17, 40, 90, 530])))
    tokens = tuple(rng.integers(0, spec.vocabulary_size, length).tolist())
    executor = CudaExecutor(model, CudaConfig(max_batch_size=4, max_step_tokens=64, num_blocks=160))
    reference = ReferenceExecutor(model, num_blocks=160)
    steps, problems = Steps(executor), []
    try:
        executor.warm_up()
        found = logits_of(steps, tokens, 64)
        again = logits_of(steps, tokens, int(rng.integers(1, min(64, length) + 1)))
        exact = logits_of(Steps(reference), tokens, 64)
        if (found is None) != (exact is None):
            problems.append(f"rows are faults: {found is None} here, {exact is None} there")
        elif found is not None:
            error = float(np.square(found - exact).sum() / max(np.square(exact).sum(), 1e-30))
            is_chaotic = spec.hidden_size < 16 or spec.ffn_size < 8  # a rounding turns a sign
            if not error <= LIMIT and not is_chaotic:
                problems.append(f"{error:.2e} from the reference")
            if again is None or again.tobytes() != found.tobytes():
                problems.append("chunks change bits")
        table = tuple(range(len(tokens) // 16 + 1))
        rows = [
            SequencePlan(1, len(tokens) - 1, tokens[-1:], None, table, Want.SAMPLE, sampling=how)
            for how in (GREEDY, DRAWN)
        ]
        rows.append(SequencePlan(3, len(tokens) - 1, tokens[-1:], None, table, Want.POOLED))
        together = [steps.run(row._replace(sequence_id=9))[0] for row in rows]
        for row, alone in zip(rows, together, strict=True):
            beside = steps.run(row)[0]
            if (beside.token, beside.fault) != (alone.token, alone.fault):
                problems.append("the same row twice gives two answers")
        broken = SequencePlan(4, 0, (spec.vocabulary_size,), None, (0,), Want.LOGITS)
        if steps.run(broken)[0].fault is None:
            problems.append("a token outside the vocabulary is no fault")
    finally:
        executor.close()
        reference.close()
    return problems, steps.count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=540.0)
    options = parser.parse_args()
    started, num_ran, num_refused, num_steps, wrong = time.monotonic(), 0, 0, 0, 0
    number = options.first
    while number < options.first + options.count:
        if time.monotonic() - started > options.seconds:
            break
        model = made(number)
        try:
            problems, count = problems_of(model, number)
            num_ran, num_steps = num_ran + 1, num_steps + count
        except UnsupportedModelError as error:
            num_refused += 1
            problems = []
            print(f"{number}: refused: {error}", flush=True)
        except Exception as error:
            problems = [f"raised {type(error).__name__}: {error}"]
        if problems:
            wrong += 1
            print(f"{number}: {'; '.join(problems)[:500]}; {shape_of(number)}", flush=True)
        number += 1
    took = time.monotonic() - started
    print(
        f"extreme shapes {options.first} to {number - 1}: {num_ran} ran ({num_steps} steps), "
        f"{num_refused} refused, {wrong} wrong, {took:.0f} s; go on with --first {number}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
