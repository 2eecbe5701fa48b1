"""The plain Triton kernels for GPUs since Ampere: they compile, fit and spill no sums."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.executors.cuda.compiling import SHARED_MEMORY_OF, compiled, pretend  # noqa: E402
from tests.executors.cuda.test_hopper_compiles import (  # noqa: E402
    DECODED,
    MIXTURE,
    NEMOTRON,
    _Catch,
    expert_call,
    made,
)

from quire.executors.cuda import attention as launchers  # noqa: E402
from quire.executors.cuda import experts  # noqa: E402
from quire.executors.cuda import states as launched_states  # noqa: E402
from quire.executors.cuda.expert_weights import Stack  # noqa: E402
from quire.executors.cuda.gemm import (  # noqa: E402
    PLAIN_TILINGS,
    PortableGemm,
    factors,
    head_tiling,
    plane_pointers,
)
from quire.executors.cuda.kernels import attention as plain_attention  # noqa: E402
from quire.executors.cuda.kernels import experts as expert_kernels  # noqa: E402
from quire.executors.cuda.kernels import gates, states  # noqa: E402
from quire.executors.cuda.kernels import gemm as portable  # noqa: E402
from quire.executors.cuda.kernels import latent as latents  # noqa: E402
from quire.executors.cuda.latent import latent_groups  # noqa: E402
from quire.model.spec import Experts  # noqa: E402
from quire.model.states import StateKind, StateMixer  # noqa: E402

CAPABILITIES = tuple(SHARED_MEMORY_OF)
# A format is compiled for one GPU: it is decoded by the same code on all of them. What differs, the
# product, is compiled for each.
BY_TURNS = [(name, CAPABILITIES[at % len(CAPABILITIES)]) for at, name in enumerate(DECODED)]
ONE_ADDRESS = 8  # bytes: what the assembler puts aside though registers are left


def caught(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> _Catch:
    kernel = getattr(module, name)
    kernel.device_caches.clear()  # of another GPU's code
    catch = _Catch(kernel)
    monkeypatch.setattr(module, name, catch)
    return catch


def check_gemm(
    capability: int,
    format_name: str,
    num_tokens: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(capability)
    catch = caught(portable, "gemm", monkeypatch)
    linear = made(format_name, 256, gated=False)
    tokens = torch.empty((num_tokens, 512), dtype=torch.float16)
    sums = torch.empty((1, num_tokens, 256))
    PortableGemm(exact=False).multiply(linear, tokens, sums, num_tokens)
    usage, listing = compiled(catch.found, folder)
    print(capability, format_name, num_tokens, usage)
    assert catch.found.metadata.target.arch == capability
    assert usage.stack <= ONE_ADDRESS
    assert usage.shared <= SHARED_MEMORY_OF[capability]
    assert any(name in listing for name in ("HMMA", "HGMMA", "UTCHMMA"))


@pytest.mark.parametrize("num_tokens", [shape.tokens for shape in PLAIN_TILINGS])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_gemm_fits_every_gpu_in_every_tiling(
    capability: int, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_gemm(capability, "Q4_K", num_tokens, tmp_path, monkeypatch)


@pytest.mark.parametrize(("format_name", "capability"), BY_TURNS)
def test_a_gemm_of_every_format_fits_in_its_largest_tiling(
    format_name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_gemm(capability, format_name, PLAIN_TILINGS[-1].tokens, tmp_path, monkeypatch)


@pytest.mark.parametrize("part", [MIXTURE, NEMOTRON], ids=["gated", "without gates"])
@pytest.mark.parametrize(
    ("format_name", "capability"),
    [*(("Q4_K", capability) for capability in CAPABILITIES), ("IQ3_S", 89)],
)
def test_a_grouped_gemm_fits_every_gpu(
    capability: int,
    format_name: str,
    part: Experts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(capability)
    names = ("multiply_gated", "multiply_weighed")
    catches = [caught(expert_kernels, name, monkeypatch) for name in names]
    gemm = experts.PortableExperts(exact=False)
    rows = 1536
    planes = made(format_name, 4 * rows, gated=False).segments[0].planes
    stack = Stack(planes, rows, rows, torch.empty(4 * rows), 512)
    call = expert_call(16, gemm.tile_tokens(part, 16), part)
    tokens = torch.empty((128, 512), dtype=torch.float16)
    gemm.multiply_gated(call, stack, tokens, torch.empty((128, 1536), dtype=torch.float16))
    gemm.multiply_weighed(call, stack, tokens, torch.empty((8, 16, rows)))
    for name, catch in zip(names, catches, strict=True):
        usage, _ = compiled(catch.found, tmp_path)
        print(capability, format_name, name, usage)
        assert usage.stack <= ONE_ADDRESS
        assert usage.shared <= SHARED_MEMORY_OF[capability]


@pytest.mark.parametrize(
    ("capability", "num_heads"),
    [*((capability, 128) for capability in CAPABILITIES), (90, 16), (90, 20), (90, 40)],
)
def test_latent_attention_fits_every_gpu(
    capability: int, num_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's sizes, and the heads of others."""
    pretend(capability)
    catch = caught(plain_attention, "attend", monkeypatch)
    merge = caught(plain_attention, "merge_splits", monkeypatch)
    groups = latent_groups(num_heads)
    spec: Any = SimpleNamespace(num_heads=num_heads, num_kv_heads=groups, head_dim=512)
    splits = launchers._Splits(launchers.split_buffers([spec], 4, 4, "cpu"))
    options = {"PDL": capability >= 90, "launch_pdl": capability >= 90}
    attention = launchers.PlainAttention(
        spec, splits, 16, options, exact=False, latent_rope_dims=64
    )
    keys = torch.empty((8, 1, 16, 576), dtype=torch.bfloat16)
    integers = torch.empty((5, 4), dtype=torch.int32)
    inputs = launchers.AttentionInput(
        queries=torch.empty((4, num_heads, 576), dtype=torch.bfloat16),
        tables=integers[0],
        tiles=plain_attention.TokenTiles(*integers),
        out=torch.empty((4, num_heads * 512), dtype=torch.float16),
    )
    cache, layer = launchers.LayerCache(keys, keys), launchers.LayerAttention(0.1)
    for num_splits in (0, 4):
        attention.attend(inputs, cache, layer, num_splits)
        usage, _ = compiled(catch.found, tmp_path)
        print(capability, num_heads, num_splits, usage)
        assert usage.stack <= ONE_ADDRESS
        assert usage.shared <= SHARED_MEMORY_OF[capability]
    assert compiled(merge.found, tmp_path)[0].stack <= ONE_ADDRESS


@pytest.mark.parametrize("num_tokens", [shape.tokens for shape in PLAIN_TILINGS])
@pytest.mark.parametrize(
    ("format_name", "capability"),
    [*(("Q8_0", capability) for capability in CAPABILITIES), ("Q4_K", 90), ("BF16", 90)],
)
def test_a_gemm_with_a_matrix_for_each_head_fits_every_gpu(
    format_name: str,
    capability: int,
    num_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(capability)
    catch = caught(latents, "multiply_heads", monkeypatch)
    planes = made(format_name, 16 * 128, gated=False).segments[0].planes
    tokens = torch.empty((num_tokens, 16, 512), dtype=torch.float16)
    shape = head_tiling(num_tokens, exact=False)
    for to, scales in ((torch.bfloat16, torch.empty(64)), (torch.float16, None)):
        latents.multiply_heads[(2, 16, 1)](
            tokens,
            torch.empty((num_tokens, 16 * 128), dtype=to),
            plane_pointers(planes),
            factors(planes),
            torch.empty(num_tokens, dtype=torch.int32),
            scales,
            num_tokens,
            128,
            planes.num_blocks,
            16 * 128,
            128,
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            FORMAT=planes.layout,
            OPERAND_ORDER=scales is None,
            EXACT=False,
            PDL=capability >= 90,
            launch_pdl=capability >= 90,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        usage, listing = compiled(catch.found, tmp_path)
        print(format_name, capability, num_tokens, usage)
        assert usage.stack <= ONE_ADDRESS
        assert usage.shared <= SHARED_MEMORY_OF[capability]
        assert any(name in listing for name in ("HMMA", "HGMMA", "UTCHMMA"))


@pytest.mark.parametrize(
    ("capability", "heads", "kv_heads", "head_dim", "has_slopes", "kept"),
    [
        *((capability, 32, 8, 128, False, "bfloat16") for capability in CAPABILITIES),
        (89, 9, 3, 64, False, "bfloat16"),
        *((capability, 32, 4, 512, False, "bfloat16") for capability in CAPABILITIES),
        *((90, 8, 1, 512, False, kept) for kept in ("bfloat16", "int8", "uint8")),
        (90, 16, 1, 512, False, "bfloat16"),
        *((capability, 32, 32, 128, True, "bfloat16") for capability in CAPABILITIES),
        *((capability, 16, 16, 64, True, "bfloat16") for capability in (89, 90)),
        *((90, 32, 32, 128, True, kept) for kept in ("int8", "uint8")),
    ],
)
def test_attention_fits_every_gpu(
    capability: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    has_slopes: bool,
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(capability)
    catch = caught(plain_attention, "attend", monkeypatch)
    spec: Any = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    splits = launchers._Splits(launchers.split_buffers([spec], 4, 1, "cpu"))
    options = {"PDL": capability >= 90, "launch_pdl": capability >= 90}
    attention = launchers.PlainAttention(spec, splits, 16, options, exact=False)
    keys = torch.empty((8, kv_heads, 16, head_dim), dtype=getattr(torch, kept))
    scales = torch.empty((8, kv_heads, 2, 16)) if keys.element_size() == 1 else None
    integers = torch.empty((5, 4), dtype=torch.int32)
    inputs = launchers.AttentionInput(
        queries=torch.empty((4, heads, head_dim), dtype=torch.bfloat16),
        tables=integers[0],
        tiles=plain_attention.TokenTiles(*integers),
        out=torch.empty((4, heads * head_dim), dtype=torch.float16),
    )
    slopes = torch.empty(heads) if has_slopes else None
    layer = launchers.LayerAttention(head_dim**-0.5, slopes=slopes)
    attention.attend(inputs, launchers.LayerCache(keys, keys, scales), layer, 0)
    usage, _ = compiled(catch.found, tmp_path)
    print(capability, heads, has_slopes, kept, usage)
    assert usage.stack <= ONE_ADDRESS
    assert usage.shared <= SHARED_MEMORY_OF[capability]


STATES = {
    "Qwen3.5 27B": StateMixer(
        kind=StateKind.DELTA_NET,
        kernel=4,
        num_heads=48,
        num_groups=16,
        key_dim=128,
        value_dim=128,
        is_tiled=True,
        norm_epsilon=1e-6,
    ),
    "Granite 4 small": StateMixer(
        kind=StateKind.MAMBA,
        kernel=4,
        num_heads=128,
        key_dim=128,
        value_dim=64,
        has_convolution_bias=True,
        norm_epsilon=1e-5,
    ),
    "LFM2 1.2B": StateMixer(kind=StateKind.CONVOLUTION, kernel=3, value_dim=2048),
}


def launches_of(
    part: StateMixer,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int = 64,
    num_splits: int = 2,
) -> dict[str, Any]:
    """The kernels of a layer that keeps a state, compiled for such a step."""
    pretend(capability)
    names = [(states, name) for name in ("convolve_alone", "convolve_heads", "recur")]
    names.append((gates, "gate_heads"))
    with monkeypatch.context() as patched:
        catches = {name: caught(module, name, patched) for module, name in names}
        options = {"PDL": capability >= 90, "launch_pdl": capability >= 90}
        found = {name: torch.empty(shape) for name, shape in part.vectors().items()}
        weights = launched_states.StateWeights(
            found["ssm_conv1d.weight"].T.contiguous(),
            found.get("ssm_conv1d.bias"),
            found.get("ssm_a.weight"),
            found.get("ssm_dt.bias"),
            found.get("ssm_d.weight"),
            found.get("ssm_norm.weight"),
        )
        sums = torch.empty((num_splits, 64, launched_states.num_projected(part)))
        launched_states.StateRunner([part], 64, 64, options, "cpu").run(
            part,
            weights,
            launched_states.States({0: part}, 2, "cpu").layers[0],
            gates.Sums(sums, sums.stride(0), sums.stride(1)),
            num_splits,
            states.Chunks(*torch.empty((5, num_tokens), dtype=torch.int32)),
        )
    return {name: catch.found for name, catch in catches.items() if catch.found is not None}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("part", STATES.values(), ids=STATES.keys())
def test_layers_that_keep_a_state_fit_every_gpu(
    capability: int, part: StateMixer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = launches_of(part, capability, monkeypatch)
    assert len(launches) == (1 if part.kind is StateKind.CONVOLUTION else 3)
    for name, launch in launches.items():
        usage, _ = compiled(launch, tmp_path)
        print(capability, part.kind, name, usage)
        assert usage.stack == 0
        assert usage.shared <= SHARED_MEMORY_OF[capability]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["Qwen3.5 27B", "Granite 4 small"])
def test_sums_of_states_have_one_order_in_steps_of_any_size(
    capability: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled anew for other splits, and where integers lie at other addresses."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for num_tokens, num_splits in ((64, 1), (64, 4), (1, 4), (3, 2)):
        launches = launches_of(STATES[name], capability, monkeypatch, num_tokens, num_splits)
        for kernel, launch in launches.items():
            found.setdefault(kernel, set()).add(layouts_of_sums(launch.asm["ttgir"]))
    assert found.keys() == {"convolve_heads", "recur", "gate_heads"}
    assert all(len(layouts) == 1 for layouts in found.values())
    assert all(found["recur"]) and all(found["gate_heads"])


def layouts_of_sums(text: str) -> tuple[str, ...]:
    """Which numbers of what is summed each lane has."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    summed = re.findall(r'"tt\.reduce".*?\}\) : \((tensor<.*?)>\) -> ', text, re.DOTALL)
    return tuple(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), x) for x in summed)
