"""Every family of the loader, with its biases, norms, windows and ropes, beside the reference."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.drawn_families import CASES, DRAWN, in_its_context, write_drawn
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.cuda.half_reference import operands_in_halves
from tests.executors.reference.plans import row, run
from tests.fixture_files import FIXTURES

from quire.core.errors import ConfigError, UnsupportedModelError
from quire.core.plan import StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.executor import check_fits
from quire.executors.reference import ReferenceExecutor
from quire.loader.tensor import Tensor
from quire.model.features import unsupported
from quire.model.loading import Model, load_model
from quire.model.spec import (
    Activation,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    PositionScale,
    QKNorm,
)
from quire.quant.formats import format_named

FAMILIES = ("llama-linear-biased-tied", "mistral", "qwen2", "qwen2-yarn", "qwen3")
ON_CUDA = {  # of the drawn families
    *("phi3", "phi3-long", "phi3-short", "ministral", "ministral3", "seed_oss"),
    *("gemma", "gemma2", "gemma2-scale", "gemma3", "smollm3", "granite", "olmo2", "olmo3"),
    *("exaone4", "glm4", "starcoder2", "command-r", "cohere2"),
    *("mixtral", "qwen3moe", "qwen3moe-dense", "gpt-oss", "granitemoe", "olmoe"),
    *("stablelm", "ernie4_5", "glm", "olmo", "arcee", "nemotron"),
    *("qwen2moe", "glm4moe", "dots1", "solar_open", "ernie4_5-moe", "minimax-m2"),
    *("stablelm-parallel", "gptneox-after", "internlm2", "internlm3", "exaone", "minicpm"),
    *("granite-shared", "granitemoe-shared", "deepseek", "bailingmoe", "exaone-moe"),
    *("falcon-one-key", "falcon-one-norm", "qwen", "baichuan"),
    *("gpt2", "gpt_neo", "starcoder", "starcoder-heads", "phi2", "falcon", "gptneox"),
    *("apertus", "hunyuan-dense", "hunyuan-moe", "bloom", "mpt"),
    *("gemma4", "gemma4-experts", "llama4", "phimoe", "bailingmoe2"),
    *("deepseek2", "deepseek2-lite", "deepseek2-glm", "kimi_k2", "minicpm3", "mistral4"),
    *("afmoe", "qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe"),
    *("granitehybrid", "granitehybrid-dense", "bamba", "falcon-h1", "falcon-h1-normed"),
    *("nemotron_h", "nemotron_h_moe", "mamba2"),
}
# Tokens before one whose experts change with what is rounded.
NEAR_TIES = {
    "qwen2moe": 6,
    "solar_open": 9,
    "ernie4_5-moe": 9,
    "minimax-m2": 9,
    "deepseek": 4,
    "gemma4-experts": 3,
    "phimoe": 5,
    "deepseek2": 9,
    "deepseek2-glm": 8,
    "kimi_k2": 4,
}
PROMPT = (3, 1, 4, 1, 5, 9)


def logits_of(executor: Any, plan: StepPlan) -> Any:
    return np.asarray(run(executor, *plan.sequences)[-1].logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_references(name: str) -> None:
    with load_in_bfloat(FIXTURES / "families" / name) as model:
        config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=4, device="cpu")
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=4)
    executor.warm_up()
    plan = StepPlan(0, (row(PROMPT, (2, 0), want=Want.LOGITS),))
    found = np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)
    exact = np.asarray(reference.collect(reference.submit(plan), 60).sequences[0].logits)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 2e-4


@pytest.mark.parametrize("case", CASES)
def test_a_drawn_family_is_run_as_the_reference_does_or_refused_by_name(
    case: str, tmp_path: Path
) -> None:
    config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=8, device="cpu")
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        model = in_its_context(case, model)
        lacking = unsupported(model.spec, "cuda")
        assert bool(lacking) == (case not in ON_CUDA)
        if lacking:
            with pytest.raises(UnsupportedModelError) as caught:
                CudaExecutor(model, config)
            assert all(what in str(caught.value) for what in lacking)
            return
        check_beside_reference(model, case)


def test_what_weighs_a_states_tokens_may_be_in_f32(tmp_path: Path) -> None:
    with load_in_bfloat(write_drawn("qwen35", tmp_path)) as model:
        tensors = dict(model.tensors)
        for name, tensor in model.tensors.items():
            if name.endswith(("ssm_alpha.weight", "ssm_beta.weight")):
                assert tensor.format.name == "BF16"
                floats = tensor.to_float32().view(np.uint8).ravel()
                tensors[name] = Tensor(name, tensor.shape, format_named("F32", name), floats)
        check_beside_reference(replace(model, tensors=tensors), "qwen35")


def check_beside_reference(model: Model, case: str) -> None:
    config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=8, device="cpu")
    executor = CudaExecutor(model, config)
    reference = ReferenceExecutor(model, num_blocks=8)
    rounded = ReferenceExecutor(model, num_blocks=8, kv_precision="bfloat16")
    executor.warm_up()
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[: NEAR_TIES.get(case, 12)]
    plan = StepPlan(0, (row(tokens, (2, 0), want=Want.LOGITS),))
    found, exact = (logits_of(each, plan) for each in (executor, reference))
    with operands_in_halves():
        noisy = logits_of(rounded, plan)
    # What is rounded changes a model's logits so much. The interpreter cuts numbers off instead:
    # errors of twice the size.
    noise = ((noisy - exact) ** 2).sum()
    assert ((found - exact) ** 2).sum() < 4 * noise + 2e-4 * (exact**2).sum()


# What the drawn models have so weakly that twelve tokens hardly show it.
STRONG: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "logits capped at 1": lambda spec: replace(spec, logit_soft_cap=1.0),
    "a norm after the embedding": lambda spec: replace(
        spec, embedding_norm=Norm(epsilon=1e-3, kind=NormKind.LAYER, has_weight=False)
    ),
    "gates clamped": lambda spec: with_activation(spec, Activation.CLAMPED_SWIGLU),
    "scores capped at 0.5": lambda spec: with_mixers(spec, soft_cap=0.5),
    "norms after rope without weights, then queries scaled": lambda spec: with_mixers(
        spec,
        qk_norm=QKNorm(norm=Norm(epsilon=0.5, has_weight=False), is_after_rope=True),
        position_scale=PositionScale(factor=2.0, length=3, offset=1),
    ),
    "layer norms of each head after rope": lambda spec: with_mixers(
        spec,
        qk_norm=QKNorm(
            norm=Norm(epsilon=0.5, kind=NormKind.LAYER, has_weight=False),
            span=NormSpan.EACH_HEAD,
            is_after_rope=True,
        ),
    ),
    "chunks of 5": lambda spec: with_mixers(spec, window=5, is_chunked=True),
    "queries scaled by position": lambda spec: with_mixers(
        spec, position_scale=PositionScale(factor=2.0, length=3, offset=1)
    ),
}


def with_mixers(spec: ModelSpec, **changes: Any) -> ModelSpec:
    layers = tuple(replace(x, mixer=replace(x.attention, **changes)) for x in spec.layers)
    return replace(spec, layers=layers)


def with_activation(spec: ModelSpec, activation: Activation) -> ModelSpec:
    feeds = [replace(x.feed, activation=activation) for x in spec.layers]
    pairs = zip(spec.layers, feeds, strict=True)
    return replace(spec, layers=tuple(replace(x, feed_forward=feed) for x, feed in pairs))


def test_experts_of_other_activations_are_refused(tmp_path: Path) -> None:
    with load_in_bfloat(write_drawn("qwen3moe", tmp_path)) as model:
        other = replace(model, spec=with_activation(model.spec, Activation.GELU))
        with pytest.raises(UnsupportedModelError, match="experts with the activation gelu"):
            check_fits(other, device="cpu")


@pytest.mark.parametrize("case", ["mixtral", "deepseek2", "gemma4"])
def test_scales_of_linears_are_refused_beside_those_that_have_none(
    case: str, tmp_path: Path
) -> None:
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        other = replace(model, spec=replace(model.spec, linear_scales=True))
        with pytest.raises(UnsupportedModelError, match=r"of their own and (a mix|lat|emb)"):
            check_fits(other, device="cpu")


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        (QKNorm(norm=Norm(epsilon=0.5, has_bias=True)), "keys with biases"),
        (
            QKNorm(norm=Norm(epsilon=0.5, kind=NormKind.LAYER), span=NormSpan.PROJECTION),
            "layer norms of queries and keys over all heads",
        ),
        (
            QKNorm(norm=Norm(epsilon=0.5), span=NormSpan.PROJECTION, is_after_rope=True),
            "keys after rope over all heads",
        ),
    ],
)
def test_norms_of_queries_and_keys_without_a_kernel_are_refused(
    norm: QKNorm, what: str, tmp_path: Path
) -> None:
    with load_in_bfloat(write_drawn("glm4", tmp_path)) as model:
        other = replace(model, spec=with_mixers(model.spec, qk_norm=norm))
        with pytest.raises(UnsupportedModelError, match=what):
            check_fits(other, device="cpu")


@pytest.mark.parametrize("kv_type", ["fp8", "int8"])
def test_latent_attention_over_a_cache_in_bytes_is_refused(kv_type: Any, tmp_path: Path) -> None:
    config = CudaConfig(num_blocks=4, device="cpu", kv_type=kv_type)
    with (
        load_in_bfloat(write_drawn("minicpm3", tmp_path)) as model,
        pytest.raises(ConfigError, match=f"kv_cache_dtype is '{kv_type}'.* latent attention"),
    ):
        CudaExecutor(model, config)


def test_queries_against_latents_are_scaled_by_position(tmp_path: Path) -> None:
    scale = PositionScale(factor=2.0, length=3, offset=1)
    with load_in_bfloat(write_drawn("minicpm3", tmp_path)) as model:
        model = replace(model, spec=with_mixers(model.spec, position_scale=scale))
        check_beside_reference(model, "minicpm3")


@pytest.mark.parametrize("change", STRONG.values(), ids=STRONG.keys())
def test_what_a_drawn_family_hardly_shows_is_run_as_the_reference_does(
    change: Callable[[ModelSpec], ModelSpec], tmp_path: Path
) -> None:
    with load_in_bfloat(write_drawn("glm4", tmp_path)) as model:
        check_beside_reference(replace(model, spec=change(model.spec)), "glm4")


# Between them: every span of head norms, both kinds of norm before and after halves or not at all,
# parallel halves, windows, layers without rope, scales and soft caps, learned positions, xielu,
# ALiBi, layers of other heads, that share keys and values or have inputs of their own, experts
# beside a dense feed-forward, chunks, experts whose input is weighed, a SparseMixer, latent
# attention, every kind of state, layers of one half, states beside attention and alone.
SINGULAR = (
    *("gemma2", "gemma3", "olmo3", "exaone4", "cohere2", "starcoder2", "ministral3"),
    *("gpt2", "gptneox", "apertus", "hunyuan-dense", "bloom"),
    *("gemma4", "gemma4-experts", "llama4", "phimoe", "deepseek2-lite", "mistral4"),
    *("qwen35", "lfm2", "granitehybrid-dense", "nemotron_h_moe", "falcon-h1", "mamba2"),
)


@pytest.mark.parametrize("case", SINGULAR)
def test_a_drawn_familys_rows_have_the_same_bits_in_any_company(case: str, tmp_path: Path) -> None:
    config = CudaConfig(max_batch_size=4, max_step_tokens=32, num_blocks=8, device="cpu")
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        executor = CudaExecutor(model, config)
    executor.warm_up()
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[:12]
    whole = logits_of(executor, StepPlan(0, (row(tokens, (2, 0), want=Want.LOGITS),)))
    others = row(tokens[3:], (1,), sequence_id=1, want=Want.NOTHING)
    run(executor, others, row(tokens[:11], (3, 4), want=Want.NOTHING))
    last = StepPlan(2, (row(tokens[11:], (3, 4), start=11, want=Want.LOGITS),))
    assert np.array_equal(logits_of(executor, last)[0], whole[11])


@pytest.mark.parametrize("name", ["dummy:tiny-gemma3", "dummy:tiny-gpt-oss"])
def test_a_familys_dummy_in_its_usual_mix_runs_as_the_reference_does(name: str) -> None:
    with load_model(name) as model:
        config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=4, device="cpu")
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=4)
    executor.warm_up()
    # Tokens whose experts are no near ties, which any other order of sums may decide otherwise.
    plan = StepPlan(0, (row((5, 6, 7), (2, 0), want=Want.LOGITS),))
    found, exact = logits_of(executor, plan), logits_of(reference, plan)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 2e-4


def test_a_product_may_mix_formats() -> None:
    """As files do: values of more bits than keys, and here gates of fewer than what they gate."""
    names = ("blk.0.ffn_up.weight", "blk.1.attn_k.weight", "blk.1.ffn_down.weight")
    with load_model("dummy:tiny:Q4_K_M") as model, load_model("dummy:tiny:Q8_0") as other:
        mixed = {name: other.tensors[name] for name in names}
        model = replace(model, tensors={**model.tensors, **mixed})
        config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=4, device="cpu")
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=4)
    executor.warm_up()
    qkv = executor._weights.layers[1].qkv
    assert qkv is not None
    segments = [segment.planes.format for segment in qkv.segments]
    assert segments == ["Q4_K", "Q8_0", "Q4_K"] or segments == ["Q4_K", "Q8_0", "Q6_K"]
    assert not executor._weights.layers[0].dense.gate_up.is_gated
    plan = StepPlan(0, (row(PROMPT[:3], (2, 0), want=Want.LOGITS),))
    found = np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)
    exact = np.asarray(reference.collect(reference.submit(plan), 60).sequences[0].logits)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 2e-4


@pytest.mark.parametrize("case", ["mixtral", "qwen2moe"])
def test_a_row_of_a_mixture_has_the_same_bits_beside_other_rows(case: str, tmp_path: Path) -> None:
    """Three rows of one step: ten tokens, so that they are grouped, where the row alone is not."""
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=8, device="cpu")
        executor = CudaExecutor(model, config)
    executor.warm_up()
    rows = [row(PROMPT[:at], (at,), want=Want.LOGITS) for at in (2, 3, 5)]
    together = executor.collect(executor.submit(StepPlan(0, tuple(rows))), 600).sequences
    alone = executor.collect(executor.submit(StepPlan(1, (rows[1],))), 600).sequences
    assert np.array_equal(np.asarray(together[1].logits), np.asarray(alone[0].logits))
