"""Random and extreme models, real steps over them, and plans that make no sense.

An episode is one model from one seed. Its sound steps (prompts in chunks, decodes, forks, samples,
scores, logits, pooled states) are computed by the reference and by the CPU executor, in two units
and numbers of threads: these two must agree to the bit, and with the reference within what the
formats cost. Then plans are mutated: a row that makes no sense has a fault of its own, or the step
an ExecutorError, and the sound rows beside it keep their bits. Nothing else may be raised, and
nothing may end the process; under the sanitizers nothing may even be read out of bounds.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.extreme_models import random_model, small_spec

from quire.core.errors import ExecutorError, ModelFileError, UnsupportedModelError
from quire.core.plan import (
    NO_STATE,
    BlockCopy,
    History,
    Sampling,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    Want,
)
from quire.core.sampling import SamplingParams
from quire.executors.base import Executor
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.cpu.native import units
from quire.executors.reference import ReferenceExecutor
from quire.executors.sampler import sample, score
from quire.executors.worker import CancelFlag
from quire.model.config_spec import spec_from_config
from quire.model.loading import Model
from quire.model.rope import DivisorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from quire.model.spec import Activation, ModelSpec, tensor_shapes
from quire.model.states import StateKind, StateMixer
from quire.quant.formats import FORMATS

Floats = npt.NDArray[np.float32]
Rng = np.random.Generator

BLOCK = 16
NUM_BLOCKS = 12
NUM_STATES = 8  # slots: rows of numbers 1 and 2 have those, and their mutants any from 4 on
PATIENCE_S = 300.0
MOST_WEIGHTS = 1 << 16  # of a model: larger ones say little more, and take long
MOST_CACHED = 1 << 15  # numbers that a token leaves in the cache
FLOATS = ("F32", "F16", "BF16")
# Relative squared error that keys and values in half precision, and rounded activations, may cost.
CLOSE = {"floats": 1e-2, "blocks": 0.5}


class FindingError(AssertionError):
    """What should not have happened, with the seed that makes it happen again."""


@dataclass
class Tally:
    """What was run: a run is one step of one executor."""

    runs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def num_runs(self) -> int:
        return sum(self.runs.values())


# ---- random models


def pick(rng: Rng, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def random_rope(rng: Rng, head_dim: int) -> Rope:
    dims = 2 * int(rng.integers(1, head_dim // 2 + 1))
    scaling = pick(
        rng,
        [
            None,
            None,
            LinearScaling(pick(rng, [1.0, 4.0, 1e30])),
            Llama3Scaling(8.0, 1.0, pick(rng, [1.000001, 4.0, 1e30]), pick(rng, [1, 64, 1 << 30])),
            YarnScaling(
                pick(rng, [1.0, 40.0, 1e30]),
                pick(rng, [1, 64, 1 << 30]),
                attention_factor=pick(rng, [None, 0.0, 1.0]),
            ),
            DivisorScaling(tuple(float(n) for n in rng.uniform(1e-30, 9.0, dims // 2))),
        ],
    )
    base = pick(rng, [1.0 + 1e-15, 10.0, 1e4, 5e5, 1e12])
    return Rope(base, dims, interleaved=bool(rng.integers(2)), scaling=scaling)


def random_spec(rng: Rng) -> ModelSpec:
    """Mostly small; now and then one size is at an edge."""
    small = [2, 3, 4, 5, 8, 15, 16, 17]
    head_dim = pick(rng, pick(rng, [small, small, [31, 32, 33, 64, 100, 128, 256]]))
    num_kv_heads = pick(rng, [1, 1, 1, 2, 3, 5])
    large = [16, 63, 64, 65, 127, 128, 129, 136, 200, 256, 300]
    group = pick(rng, pick(rng, [[1, 2, 3, 4], [1, 2, 7, 8, 9], large]))
    num_layers = pick(rng, [1, 1, 1, 2, 2, 3])
    windows = [pick(rng, [None, None, 1, 2, 15, 16, 17, 100, 1 << 31]) for _ in range(num_layers)]
    changes = {
        "hidden_size": pick(rng, [1, 2, 3, 8, 17, 32, 33, 64, 96, 256, 256, 512]),
        "ffn_size": pick(rng, [1, 2, 5, 16, 31, 32, 33, 64, 256, 512]),
        "num_layers": num_layers,
        "num_heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocabulary_size": pick(rng, [1, 2, 15, 16, 17, 100, 127, 128, 129, 300]),
        "context_length": pick(rng, [1, 2, 16, 17, 100, 192, 1 << 30]),
        "norm_epsilon": pick(rng, [0.0, 1e-12, 1e-6, 1e-5, 1.0]),
        "activation": pick(rng, [Activation.SILU, Activation.RELU2]),
        "rope": random_rope(rng, head_dim),
        "windows": tuple(windows),
        "attention_soft_cap": pick(rng, [0.0, 0.0, 0.0, 1e-6, 0.5, 50.0, 1e9]),
        "logit_soft_cap": pick(rng, [0.0, 0.0, 0.0, 1e-6, 30.0, 1e9]),
    }
    names = ("qkv_bias", "output_bias", "ffn_bias", "qk_norm", "sub_norms", "linear_scales")
    for name in (*names, "tied_head"):
        changes[name] = bool(rng.integers(4) == 0)
    edge = pick(rng, [*["none"] * 30, "heads", "kv heads", "head", "layers", "vocabulary"])
    if edge == "heads":
        changes |= {"num_heads": 4096, "num_kv_heads": 1, "head_dim": 2, "hidden_size": 8}
    elif edge == "kv heads":
        changes |= {"num_heads": 2048, "num_kv_heads": 2048, "head_dim": 2, "hidden_size": 8}
    elif edge == "head":
        changes |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16384, "hidden_size": 2}
    elif edge == "layers":
        changes |= {"num_layers": 40, "windows": (None,) * 40, "hidden_size": 4, "ffn_size": 3}
        changes |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
    elif edge == "vocabulary":
        changes |= {"vocabulary_size": 20_000, "hidden_size": 2}
    if edge != "none":
        changes["rope"] = Rope(1e4, 2, interleaved=False)
    return with_states(rng, small_spec(**changes))


def with_states(rng: Rng, spec: ModelSpec) -> ModelSpec:
    """Often some layers keep a state instead of keys and values, the first never."""
    if spec.num_layers == 1 or rng.integers(2):
        return spec
    kind, kernel = pick(rng, list(StateKind)), pick(rng, [2, 3, 4, 64])
    if kind is StateKind.CONVOLUTION:
        mixer = StateMixer(kind=kind, kernel=kernel, value_dim=pick(rng, [1, 15, 33, 520]))
    elif kind is StateKind.MAMBA_1:
        has_norms = bool(rng.integers(2))
        mixer = StateMixer(
            kind=kind,
            kernel=kernel,
            key_dim=pick(rng, [1, 3, 16, 33]),
            value_dim=pick(rng, [1, 7, 16, 65]),
            step_rank=pick(rng, [1, 3, 32]),
            has_convolution_bias=bool(rng.integers(2)),
            norm_epsilon=1e-5,
            has_step_norms=has_norms,
            has_step_weights=has_norms and bool(rng.integers(2)),
        )
    else:
        num_groups = pick(rng, [1, 1, 2, 5])
        mixer = StateMixer(
            kind=kind,
            kernel=kernel,
            num_heads=num_groups * pick(rng, [1, 2, 3]),
            num_groups=num_groups,
            key_dim=pick(rng, [1, 3, 16, 33]),
            value_dim=pick(rng, [1, 7, 16, 65]),
            is_tiled=bool(rng.integers(2)),
            has_convolution_bias=bool(rng.integers(2)),
            norm_epsilon=1e-5,
        )
    layers = [spec.layers[0]]
    layers += [replace(layer, mixer=mixer) for layer in spec.layers[1:]]
    if rng.integers(2):
        layers[-1] = spec.layers[-1]
    return replace(spec, layers=tuple(layers))


WILD = (0, -1, 1, 2, 3, 7, 64, 2**15, 2**20, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 1e-300, 1e300)
WILD_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "max_window_layers"),
)


def wild_config(rng: Rng) -> dict[str, Any]:
    """A config.json with a few fields that no model has."""
    config: dict[str, Any] = {
        "model_type": pick(rng, ["llama", "mistral", "qwen2", "qwen3", "bitnet"]),
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 20,
        "max_position_embeddings": 64,
        "use_sliding_window": True,
    }
    if config["model_type"] in ("llama", "bitnet"):
        del config["use_sliding_window"]
    odd: tuple[Any, ...] = (*WILD, True, None, "12", [], math.nan, math.inf, -math.inf, 0.5)
    for name in rng.choice(WILD_FIELDS, size=int(rng.integers(1, 3)), replace=False):
        config[str(name)] = pick(rng, odd)
    if rng.integers(4) == 0:
        rope: dict[str, Any] = {"rope_type": pick(rng, ["linear", "llama3", "yarn"])}
        keys = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast")
        for key in (*keys, "original_max_position_embeddings"):
            if rng.integers(2):
                rope[key] = pick(rng, odd)
        config["rope_scaling"] = rope
    return config


def is_small(spec: ModelSpec) -> bool:
    if spec.num_layers * 9 > 4000 or spec.num_kv_elements > MOST_CACHED:
        return False
    sizes = (math.prod(shape) for shape in tensor_shapes(spec).values())
    return all(total <= MOST_WEIGHTS for total in itertools.accumulate(sizes))


def random_case(rng: Rng, tally: Tally) -> Model | None:
    """A model; None where its config.json was refused, or what it makes is large."""
    if rng.integers(3) == 0:
        try:
            spec = spec_from_config(wild_config(rng))
        except (ModelFileError, UnsupportedModelError):
            tally.outcomes["a config that was refused"] += 1
            return None
    else:
        specs = (random_spec(rng) for _ in range(100))
        spec = next(filter(is_small, specs))
    if not is_small(spec):
        tally.outcomes["a model too large for a test"] += 1
        return None
    names = [each.name for each in FORMATS if not each.tail_bytes]  # which are of BitNet alone
    usual = pick(rng, [*FLOATS, *names])
    ends = ("attn_v", "ffn_down", "output", "token_embd")
    formats = {end: pick(rng, names) for end in ends if rng.integers(4) == 0}
    return random_model(spec, int(rng.integers(1 << 32)), formats, usual)


# ---- sound steps


def random_params(rng: Rng, vocabulary: int) -> SamplingParams:
    bias = {int(t): float(rng.uniform(-100, 100)) for t in rng.integers(0, vocabulary, 3)}
    return SamplingParams(
        max_tokens=8,
        min_tokens=pick(rng, [0, 0, 3]),
        temperature=pick(rng, [0.0, 1e-6, 0.7, 1.0, 100.0]),
        top_k=pick(rng, [0, 0, 1, 3, vocabulary, 2**40]),
        top_p=pick(rng, [1.0, 1.0, 0.9, 1e-9]),
        min_p=pick(rng, [0.0, 0.0, 0.1, 1.0]),
        repetition_penalty=pick(rng, [1.0, 1.0, 1.3, 0.01, 100.0]),
        frequency_penalty=pick(rng, [0.0, 0.0, 2.0, -2.0]),
        presence_penalty=pick(rng, [0.0, 0.0, 1.5]),
        logit_bias=pick(rng, [{}, {}, bias]),
        logprobs=pick(rng, [None, 0, 5, 20]),
        prompt_logprobs=pick(rng, [None, 0, 20]),
    )


def random_sampling(rng: Rng, vocabulary: int) -> Sampling:
    return Sampling(
        random_params(rng, vocabulary),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        index=int(rng.integers(5)),
        end_token_ids=pick(rng, [(), (0,), (0, vocabulary - 1)]),
    )


def random_row(rng: Rng, model: Model, number: int, table: tuple[int, ...]) -> SequencePlan:
    """A whole prompt in one row: its result is the same however often it is asked for."""
    spec = model.spec
    room = min(spec.context_length, len(table) * BLOCK)
    longest = min(room, pick(rng, [1, 3, 3, 6, 6, 20, 40]))
    tokens = random_tokens(rng, spec.vocabulary_size, int(rng.integers(1, longest + 1)))
    want = pick(rng, list(Want))
    targets = (
        random_tokens(rng, spec.vocabulary_size, len(tokens) - 1) if rng.integers(3) == 0 else ()
    )
    states = (NO_STATE, number % NUM_STATES) if spec.states else ()
    plan = SequencePlan(number, 0, tokens, None, table, want, prompt_targets=targets, states=states)
    if want is not Want.SAMPLE and not targets:
        return plan
    sampling = random_sampling(rng, spec.vocabulary_size)
    history = None
    if sampling.params.needs_history:
        history = History(tokens, random_tokens(rng, spec.vocabulary_size, 3))
    mask = None
    if rng.integers(4) == 0:
        mask = rng.bytes(-(-spec.vocabulary_size // 8))
    return plan._replace(
        sampling=sampling, completion_position=int(rng.integers(6)), history=history, allowed=mask
    )


def random_tokens(rng: Rng, vocabulary: int, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocabulary, max(0, count)).tolist())


def same(one: SequenceResult, other: SequenceResult) -> bool:
    """To the bit."""
    for a, b in ((one.logits, other.logits), (one.pooled, other.pooled)):
        if (a is None) != (b is None) or (a is not None and a.tobytes() != b.tobytes()):
            return False
    bare = [result._replace(logits=None, pooled=None) for result in (one, other)]
    return repr(bare[0]) == repr(bare[1])


class Episode:
    """One model and the executors that run it."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.seed = seed
        self.tally = tally
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self._step_ids = itertools.count()
        self._rows: list[SequencePlan] = []  # that mutants are made of
        self._next_state = 2  # of the slots 2 and 3, which chunks use
        self.model = random_case(self.rng, tally)

    def run(self, num_mutations: int) -> None:
        if self.model is None:
            return
        self.tally.outcomes["a model that keeps states"] += bool(self.model.spec.states)
        rng, is_int8 = self.rng, bool(self.rng.integers(4) == 0)
        first, second = rng.permutation(units())[:2] if len(units()) > 1 else units() * 2
        executors: dict[str, Executor] = {
            "reference": ReferenceExecutor(
                self.model, num_blocks=NUM_BLOCKS, num_states=NUM_STATES
            ),
            f"cpu/{first}": self._cpu(str(first), 1, is_int8),
            f"cpu/{second}, threads": self._cpu(str(second), self._num_threads, is_int8),
        }
        try:
            self._run(executors, num_mutations)
        finally:
            for executor in executors.values():
                executor.close()

    def _cpu(self, unit: str, threads: int, is_int8: bool) -> CpuExecutor:
        assert self.model is not None
        count = Threads(threads, may_spin=False)
        return CpuExecutor(
            self.model,
            num_blocks=NUM_BLOCKS,
            num_states=NUM_STATES,
            threads=count,
            kv_int8=is_int8,
            unit=unit,
            prefault_bytes=0,
        )

    def _run(self, executors: dict[str, Executor], num_mutations: int) -> None:
        reference, one, two = executors
        self._compare_logits(executors)
        table = tuple(range(4, 7))
        sound = [random_row(self.rng, self._model, 1, table)]
        sound.append(random_row(self.rng, self._model, 2, (7, 8, 9)))
        expected = {}
        for name, executor in executors.items():
            alone = [self._step(name, executor, (plan,))[0] for plan in sound]
            together = self._step(name, executor, tuple(sound))
            self._expect(all(map(same, alone, together)), f"{name}: a row depends on its company")
            expected[name] = alone
        self._expect(all(map(same, expected[one], expected[two])), f"{one} and {two} differ")
        self._check_sampler(one, executors[one], sound, expected[one])
        self._rows = [
            random_row(self.rng, self._model, 4, tuple(self.rng.permutation(4).tolist()))
            for _ in range(1 + num_mutations // 8)
        ]
        for number in range(num_mutations):
            name = reference if number % 32 == 0 else (one, two)[number % 2]
            self._mutated(name, executors[name], sound, expected[name])

    @property
    def _num_threads(self) -> int:
        """More than one where it does not take long: threads meet several times a layer."""
        return 2 if self._model.spec.num_layers < 4 and self.seed % 4 == 0 else 1

    @property
    def _model(self) -> Model:
        assert self.model is not None
        return self.model

    def _step(
        self,
        name: str,
        executor: Executor,
        rows: Any,
        copies: Any = (),
        *,
        at_once: bool = False,
    ) -> tuple[SequenceResult, ...]:
        """`at_once`: on this thread, which is faster than to wait for the executor's."""
        plan = StepPlan(next(self._step_ids), rows, copies)
        self.tally.runs[name.partition(",")[0]] += 1
        if at_once:
            compute: Callable[..., StepResult] = executor._compute  # type: ignore[attr-defined]
            return compute(plan, CancelFlag()).sequences
        return executor.collect(executor.submit(plan), PATIENCE_S).sequences

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise FindingError(f"seed {self.seed}: {what}; {self._model.spec}")

    # ---- logits, in chunks and after a fork

    def _compare_logits(self, executors: dict[str, Executor]) -> None:
        """A prompt, whole and in chunks, and from a copy of its first block."""
        spec, rng = self._model.spec, self.rng
        length = min(spec.context_length, pick(rng, [1, 2, 16, 17, 33, 60]))
        tokens = random_tokens(rng, spec.vocabulary_size, length)
        chunk = int(rng.integers(1, length + 1))
        found: list[Floats | None] = []
        for name, executor in executors.items():
            table = tuple(rng.permutation(4).tolist())
            whole = self._step(name, executor, (self._logits_of(tokens, 0, table),))[0]
            parts = [
                self._step(name, executor, (self._logits_of(tokens[i : i + chunk], i, table),))[0]
                for i in range(0, length, chunk)
            ]
            faults = {part.fault for part in parts} - {None}
            if whole.fault is not None:
                self._expect(bool(faults), f"{name}: chunks hide the fault {whole.fault!r}")
                self.tally.outcomes["a model whose rows are faults"] += 1
                found.append(None)
                continue
            self._expect(not faults, f"{name}: chunks have faults of their own: {faults}")
            chunks = np.concatenate([part.logits for part in parts])
            self._expect(chunks.tobytes() == whole.logits.tobytes(), f"{name}: chunks differ")
            self._check_fork(name, executor, tokens, table, whole.logits)
            found.append(whole.logits)
        exact, one, two = found
        self._expect((one is None) == (two is None), "one unit has a fault, the other has none")
        if one is None or two is None or exact is None:
            return
        self._expect(one.tobytes() == two.tobytes(), "units differ in their logits")
        self._check_close(exact, one)

    def _logits_of(
        self, tokens: tuple[int, ...], start: int, table: tuple[int, ...]
    ) -> SequencePlan:
        """Of a sequence whose states take turns in two slots."""
        states: tuple[int, ...] = ()
        if self._model.spec.states:
            source, self._next_state = self._next_state, 5 - self._next_state
            states = (5 - source if start else NO_STATE, source)
        return SequencePlan(0, start, tokens, None, table, Want.LOGITS, states=states)

    def _check_fork(
        self,
        name: str,
        executor: Executor,
        tokens: tuple[int, ...],
        table: tuple[int, ...],
        logits: Floats,
    ) -> None:
        """The last token again, over copies of all blocks."""
        start = len(tokens) - 1
        if self._model.spec.states and start:  # it starts from the state before that token
            self._step(name, executor, (self._logits_of(tokens[:-1], 0, table),))
        copies = tuple(BlockCopy(block, 4 + place) for place, block in enumerate(table))
        plan = self._logits_of(tokens[-1:], start, tuple(c.target for c in copies))
        [forked] = self._step(name, executor, (plan,), copies)
        self._expect(forked.fault is None, f"{name}: a fork has the fault {forked.fault}")
        self._expect(forked.logits[-1].tobytes() == logits[-1].tobytes(), f"{name}: a fork differs")

    def _check_close(self, exact: Floats, found: Floats) -> None:
        """Where the model is not a chaos of its own: narrow ones turn a rounding into a sign, and
        a few logits may all be near zero."""
        spec = self._model.spec
        if min(spec.hidden_size, spec.ffn_size) < 16 or spec.num_layers > 10 or exact.size < 64:
            return
        formats = {t.format.name for t in self._model.tensors.values() if len(t.shape) == 2}
        limit = CLOSE["floats"] if formats <= set(FLOATS) else CLOSE["blocks"]
        power = float(np.square(exact.astype(np.float64)).sum())
        error = float(np.square(exact.astype(np.float64) - found).sum())
        self.tally.outcomes["logits held against the reference's"] += 1
        self._expect(
            error <= limit * power,
            f"logits are {error / max(power, 1e-300):.3g} from the reference's, in {formats}",
        )

    def _check_sampler(
        self,
        name: str,
        executor: Executor,
        plans: Sequence[SequencePlan],
        results: Sequence[SequenceResult],
    ) -> None:
        """The reference sampler gives the same, to the bit, on the executor's own logits."""
        for plan, result in zip(plans, results, strict=True):
            if result.fault is not None or plan.want is not Want.SAMPLE or plan.sampling is None:
                continue
            bare = plan._replace(want=Want.LOGITS, prompt_targets=())
            logits = self._step(name, executor, (bare,))[0].logits
            extras = plan.completion_position, plan.history, plan.allowed
            with np.errstate(all="ignore"):
                choice = sample(logits[-1], plan.sampling, *extras)
            self._expect(choice == (result.token, result.logprob), f"{name}: samples differ")
            top = plan.sampling.params.prompt_logprobs or 0
            scores = tuple(
                score(row, target, top)
                for row, target in zip(logits, plan.prompt_targets, strict=False)
            )
            self._expect(scores == result.prompt_logprobs, f"{name}: prompt scores differ")
            self.tally.outcomes["samples held against the reference's"] += 1

    # ---- plans that make no sense

    def _mutated(
        self,
        name: str,
        executor: Executor,
        sound: Sequence[SequencePlan],
        expected: Sequence[SequenceResult],
    ) -> None:
        mutants = [self._mutant() for _ in range(int(self.rng.integers(1, 3)))]
        rows: Any = [*sound, *mutants]
        order = self.rng.permutation(len(rows)).tolist()
        rows = tuple(rows[place] for place in order)
        copies: Any = self._copies()
        if self.rng.integers(40) == 0:
            rows = pick(self.rng, [list(rows), (*rows, None), (*rows, ()), (*rows, rows[0][:5])])
        try:
            results = self._step(name, executor, rows, copies, at_once=True)
        except ExecutorError:
            self.tally.outcomes["a step that was refused"] += 1
            return
        self._expect(len(results) == len(rows), f"{name}: {len(results)} results of {len(rows)}")
        for place, result in zip(order, results, strict=False):
            if place < len(sound):
                if not same(result, expected[place]):
                    self._expect(False, f"{name}: a row changed beside {mutants} and {copies}")
            else:
                is_fault = result.fault is not None
                self.tally.outcomes["a fault of one row" if is_fault else "a row that ran"] += 1

    def _copies(self) -> Any:
        """Among the blocks that no sound row uses, most of the time."""
        rng, wild = self.rng, (-1, NUM_BLOCKS, 2**31, 2**63, 2**70, -(2**40), "3", None, 1.5, True)
        match int(rng.integers(8)):
            case 0:
                cycle = rng.permutation(4).tolist()
                return tuple(itertools.starmap(BlockCopy, itertools.pairwise((*cycle, cycle[0]))))
            case 1:
                return (BlockCopy(pick(rng, range(NUM_BLOCKS)), pick(rng, range(4))),) * 3
            case 2:
                return (BlockCopy(pick(rng, wild), pick(rng, range(4))),)
            case 3:
                return (
                    BlockCopy(pick(rng, range(4)), pick(rng, [n for n in wild if n is not True])),
                )
            case 4 if rng.integers(4) == 0:
                return pick(rng, [None, [BlockCopy(0, 1)], (0, 1), ((0,),), ((0, 1, 2),), "ab", 7])
            case _:
                return ()

    def _mutant(self) -> Any:
        """A row on blocks of its own, with up to three things wrong."""
        rng = self.rng
        plan = pick(rng, self._rows)
        for _ in range(int(rng.integers(1, 4))):
            change = getattr(self, f"_wrong_{pick(rng, _WRONGS)}")
            with suppress(TypeError):  # where what is there is already of another type
                plan = change(plan)
        return plan

    def _number(self) -> Any:
        rng, vocabulary = self.rng, self._model.spec.vocabulary_size
        edges = (-1, -2, vocabulary, vocabulary + 1, 2**15, 2**31 - 1, 2**31, 2**32, 2**63 - 1)
        return pick(rng, [*edges, 2**63, 2**64, 2**100, -(2**31), -(2**63), -(2**64), 0, 1])

    def _thing(self) -> Any:
        odd: list[Any] = [None, "7", b"7", 1.5, math.nan, True, (), [], {}, object, (1, 2), [3]]
        return pick(self.rng, [*odd, self._number()])

    def _in_tuple(self, values: Any, thing: Any) -> Any:
        if not isinstance(values, tuple):
            return values
        at = int(self.rng.integers(len(values) + 1))
        return (*values[:at], thing, *values[at + int(self.rng.integers(2)) :])

    def _wrong_token(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(tokens=self._in_tuple(plan.tokens, self._number()))

    def _wrong_target(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(prompt_targets=self._in_tuple(plan.prompt_targets, self._number()))

    def _wrong_block(self, plan: SequencePlan) -> SequencePlan:
        """Never one of the sound rows' blocks, which it would be right to write to."""
        block = pick(self.rng, [-1, NUM_BLOCKS, NUM_BLOCKS + 1, 2**31 - 1, 2**31, 2**64, -(2**31)])
        return plan._replace(block_table=self._in_tuple(plan.block_table, block))

    def _wrong_table(self, plan: SequencePlan) -> SequencePlan:
        tables: list[Any] = [(), plan.block_table[:1] * 3, [0, 1], None, "01", (None, 0), (0.0,)]
        return plan._replace(block_table=pick(self.rng, [*tables, (0,) * 5000]))

    def _wrong_states(self, plan: SequencePlan) -> SequencePlan:
        """Never one of the sound rows' slots, which it would be right to write to."""
        slots: list[Any] = [(), (4,), (4, 5, 6), [4, 5], None, "45", (4, None), (4, 5.0), (True, 5)]
        return plan._replace(states=pick(self.rng, [*slots, *(self._slots() for _ in range(9))]))

    def _slots(self) -> tuple[int, ...]:
        wild = (NO_STATE, -2, *range(4, NUM_STATES), NUM_STATES, 2**31 - 1, 2**31, -(2**31), 2**64)
        return pick(self.rng, wild), pick(self.rng, wild)

    def _wrong_start(self, plan: SequencePlan) -> SequencePlan:
        starts = (1, 15, 16, 47, 48, NUM_BLOCKS * BLOCK - 1, NUM_BLOCKS * BLOCK, self._number())
        return plan._replace(start=pick(self.rng, starts))

    def _wrong_length(self, plan: SequencePlan) -> SequencePlan:
        longer = random_tokens(
            self.rng, self._model.spec.vocabulary_size, pick(self.rng, [60, 200])
        )
        return plan._replace(tokens=pick(self.rng, [(), plan.tokens * 2, longer]))

    def _wrong_targets(self, plan: SequencePlan) -> SequencePlan:
        targets = random_tokens(self.rng, self._model.spec.vocabulary_size, 400)
        return plan._replace(prompt_targets=targets)

    def _wrong_want(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(want=pick(self.rng, [4, -1, 2**31, 2**64, None, "1", 1.0, *Want]))

    def _wrong_follows(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(follows=pick(self.rng, [0, 1, 2**40, -1, "0", ()]))

    def _wrong_sampling(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(sampling=pick(self.rng, [None, plan.sampling]))

    def _wrong_history(self, plan: SequencePlan) -> SequencePlan:
        wrong = (self._number(),) * 3
        return plan._replace(history=pick(self.rng, [None, History(wrong, ()), History((), wrong)]))

    def _wrong_mask(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(allowed=pick(self.rng, [b"", b"\0" * 9, b"\xff", b"\xff" * 9999]))

    def _wrong_position(self, plan: SequencePlan) -> SequencePlan:
        return plan._replace(completion_position=self._number())

    def _wrong_end_tokens(self, plan: SequencePlan) -> SequencePlan:
        if plan.sampling is None:
            return plan
        sampling = replace(plan.sampling, end_token_ids=(abs(self._number()),))
        return plan._replace(sampling=sampling, completion_position=0)

    def _wrong_type(self, plan: SequencePlan) -> SequencePlan:
        names = (
            *("start", "tokens", "follows", "history", "allowed", "prompt_targets", "sampling"),
            "states",
        )
        return plan._replace(**{pick(self.rng, names): self._thing()})


_WRONGS = [name.removeprefix("_wrong_") for name in vars(Episode) if name.startswith("_wrong_")]
