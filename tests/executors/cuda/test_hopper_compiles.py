"""Gluon's machine code for Hopper: wgmma, TMA, and no spilled registers."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter runs no Gluon", allow_module_level=True)

from tests.drawn_families import write_drawn  # noqa: E402
from tests.executors.cuda.bfloat_models import load_in_bfloat  # noqa: E402
from tests.executors.cuda.compiling import (  # noqa: E402
    SHARED_MEMORY,
    compiled,
    is_serialised,
    pretend,
)

from quire.executors.cuda import attention as launchers  # noqa: E402
from quire.executors.cuda import decoder as decoders  # noqa: E402
from quire.executors.cuda import experts  # noqa: E402
from quire.executors.cuda.expert_weights import (  # noqa: E402
    ExpertWeights,
    RouterWeights,
    Stack,
)
from quire.executors.cuda.gemm import (  # noqa: E402
    MULTIPROCESSORS,
    HopperGemm,
    PortableGemm,
    ternary_tiling,
    tiling,
)
from quire.executors.cuda.kernels import attention as plain_attention  # noqa: E402
from quire.executors.cuda.kernels import experts as expert_kernels  # noqa: E402
from quire.executors.cuda.kernels import sampling as sampling_kernels  # noqa: E402
from quire.executors.cuda.kernels import scoring as scoring_kernels  # noqa: E402
from quire.executors.cuda.plane_sources import grid_table  # noqa: E402
from quire.executors.cuda.planes import DELTA_ROWS, PLANE_FORMATS, TERNARY, Planes  # noqa: E402
from quire.executors.cuda.sampling import Sampler  # noqa: E402
from quire.executors.cuda.weights import Linear, Segment, load_weights  # noqa: E402
from quire.model.kv_layout import one_group  # noqa: E402
from quire.model.spec import Activation, Experts, Router  # noqa: E402

TOKENS = (1, 16, 32, 64, 8192)
GROUPED = (
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "E4M3_128",
    "NVFP4_128",
    "Q1_0",
    "MXFP4",
    "BF16",
    "Q2_K",
    "Q3_K",
    "IQ1_M",
    "IQ2_S",
    "IQ3_S",
    "IQ4_XS",
)


def _words(rows: int, count: int) -> Any:
    return torch.empty((rows, count), dtype=torch.int32) if count else None


def made(format_name: str, rows: int, *, gated: bool) -> Linear:
    """Planes of a matrix that is never read."""
    blocks = 2
    if format_name == "BF16":
        planes = Planes(
            "BF16", rows, blocks, torch.empty((rows, 256 * blocks), dtype=torch.float16)
        )
    else:
        form = PLANE_FORMATS[format_name]
        parts = 2 if form.by_halves else 1
        padded = blocks * (-(-rows // DELTA_ROWS) * DELTA_ROWS)
        kind = torch.int32 if form.delta_bytes == 4 else torch.float16
        deltas = torch.empty(padded, dtype=kind) if form.has_deltas else None
        planes = Planes(
            format_name,
            rows,
            blocks,
            _words(parts * blocks * rows, form.code_words // parts),
            0,
            _words(blocks * rows, form.high_words),
            _words(blocks * rows, form.scale_words),
            deltas,
            grid_table(form.grid, "cpu"),
        )
    return Linear((Segment(planes, 0, None),), rows, 1, is_gated=gated)


class _Catch:
    """Compiles what is launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: Any = None
        self.grid: Any = None

    def __getitem__(self, grid: Any) -> Any:
        self.grid = grid

        def launch(*arguments: Any, **settings: Any) -> None:
            self.found = self.kernel.warmup(*arguments, grid=grid, **settings)

        return launch


# Formats that are decoded alike are compiled once. A tile of fewer tokens with as many warps, rows
# and registers has fewer sums: the largest of each kind is compiled. Tables of points want the
# smallest, too: their memory lies beside what Triton allocates.
DECODED = [*{layout: name for name, layout in PLANE_FORMATS.items()}.values(), "BF16"]
TILES = [(False, 1), (False, 64), (False, 8192), (True, 32), (True, 64), (True, 8192)]
SMALLEST = [(name, True, 1) for name in DECODED if name == "Q4_K" or name.startswith("IQ")]


@pytest.mark.parametrize(
    ("format_name", "wide", "num_tokens"),
    [*((name, *tile) for name in DECODED for tile in TILES), *SMALLEST],
)
def test_a_gemm_fits_its_registers_and_runs_on_tensor_cores(
    format_name: str, wide: bool, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    gemm = HopperGemm()
    catch = _Catch(gemm._kernels.gemm)
    monkeypatch.setattr(gemm._kernels, "gemm", catch)
    rows = 16384 if wide else 256
    linear = made(format_name, rows, gated=wide)
    tokens = torch.empty((num_tokens, 512), dtype=torch.float16)
    if wide:
        out = torch.empty((num_tokens, rows // 2), dtype=torch.float16)
        gemm.multiply_gated(linear, tokens, None, out, num_tokens)
    else:
        gemm.multiply(linear, tokens, torch.empty((1, num_tokens, rows)), num_tokens)
    usage, listing = compiled(catch.found, tmp_path)
    cut = tiling(linear.segments[0].planes.layout, rows, 1, num_tokens)
    print(format_name, num_tokens, cut, usage)
    assert usage.stack == 0
    assert usage.shared <= SHARED_MEMORY
    assert usage.can_launch
    assert "HGMMA" in listing
    assert f"64x{cut.tokens}x16" in listing


@pytest.mark.parametrize("format_name", DECODED)
def test_a_gemm_that_adds_its_splits_fits_its_registers(
    format_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    gemm = HopperGemm()
    catch = _Catch(gemm._kernels.gemm)
    monkeypatch.setattr(gemm._kernels, "gemm", catch)
    linear = replace(made(format_name, 4096, gated=False), num_splits=4)
    assert gemm.adds_splits(linear, 2048)
    tokens = torch.empty((2048, 512), dtype=torch.float16)
    gemm.multiply_added(linear, tokens, torch.empty((2048, 4096)), 2048)
    assert catch.grid == (8, 32, 1)
    usage, listing = compiled(catch.found, tmp_path)
    print(format_name, usage)
    assert usage.stack == 0
    assert usage.shared <= SHARED_MEMORY
    assert usage.can_launch
    assert "64x256x16" in listing
    assert re.search(r"REDG?\.E\.ADD", listing)


@pytest.mark.parametrize(
    ("num_rows", "num_splits", "num_tokens", "adds"),
    [
        (4096, 4, 2048, True),
        (4096, 4, 1024, True),
        (4096, 4, 1536, False),  # the second wave of programs would be short
        (4096, 4, 512, False),
        (4096, 2, 2048, False),
        (1024, 4, 2048, False),
    ],
)
def test_splits_are_added_where_programs_without_them_fill_the_gpu(
    num_rows: int, num_splits: int, num_tokens: int, adds: bool
) -> None:
    pretend()
    linear = made("Q4_K", num_rows, gated=False)
    linear = replace(linear, num_splits=num_splits)
    assert HopperGemm().adds_splits(linear, num_tokens) == adds


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("has_scales", [False, True])
def test_a_ternary_gemm_runs_on_the_tensor_cores_integers(
    has_scales: bool, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    gemm = HopperGemm()
    catch = _Catch(gemm._ternary_kernels.gemm)
    monkeypatch.setattr(gemm._ternary_kernels, "gemm", catch)
    rows, blocks = 13824, 2
    scales = torch.empty(rows * blocks, dtype=torch.float16) if has_scales else None
    planes = Planes(TERNARY, rows, blocks, _words(blocks * rows, 16), deltas=scales)
    linear = Linear((Segment(planes, 0, None),), rows, 1)
    tokens = torch.empty((num_tokens, 512), dtype=torch.int8)
    gemm.multiply(linear, tokens, torch.empty((1, num_tokens, rows)), num_tokens)
    usage, listing = compiled(catch.found, tmp_path)
    cut = ternary_tiling(planes, 1, num_tokens)
    print(num_tokens, cut, usage)
    assert usage.stack == 0
    assert usage.shared <= SHARED_MEMORY
    assert f"IGMMA.64x{min(cut.tokens, 128)}x32.S8.S8" in listing


@pytest.mark.parametrize(("num_tokens", "num_splits"), [(4, 0), (4, 4), (256, 0), (2048, 0)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (32, 2, 64), (4, 1, 256)]
)
@pytest.mark.parametrize(
    ("half", "is_singular"),
    [
        *(("bfloat16", False), ("bfloat16", True), ("float16", False)),
        *(("int8", False), ("uint8", False), ("uint8", True)),
    ],
)
def test_attention_reads_what_tma_loaded(
    half: str,
    is_singular: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_tokens: int,
    num_splits: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if half == "float16" and head_dim == 256:
        pytest.skip("attention_for takes the plain kernel")
    pretend()
    spec: Any = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    options = {"PDL": True, "launch_pdl": True}
    splits = launchers._Splits(
        launchers.split_buffers([spec], num_tokens, max(1, num_splits), "cpu")
    )
    query_type = torch.float32 if half == "float16" else torch.bfloat16
    attention = launchers.HopperAttention(
        spec, splits, 16, options, 256, has_prefill=half == "bfloat16"
    )
    is_prefill = num_tokens == 2048 and head_dim <= 128 and half == "bfloat16"
    kernels = attention._prefill if is_prefill else attention._kernels
    catch = _Catch(kernels.attend)
    merged = _Catch(plain_attention.merge_splits)
    monkeypatch.setattr(kernels, "attend", catch)
    monkeypatch.setattr(plain_attention, "merge_splits", merged)
    keys = torch.empty((8, kv_heads, 16, head_dim), dtype=getattr(torch, half))
    integers = torch.empty((5, num_tokens), dtype=torch.int32)
    inputs = launchers.AttentionInput(
        queries=torch.empty((num_tokens, heads, head_dim), dtype=query_type),
        tables=integers[0],
        tiles=plain_attention.TokenTiles(*integers),
        out=torch.empty((num_tokens, heads * head_dim), dtype=torch.float16),
    )
    layer = launchers.LayerAttention(head_dim**-0.5)
    if is_singular:
        layer = launchers.LayerAttention(0.1, 100, 50.0, torch.empty(heads))
    scales = torch.empty((8, kv_heads, 2, 16)) if keys.element_size() == 1 else None
    attention.attend(inputs, launchers.LayerCache(keys, keys, scales), layer, num_splits)
    usage, listing = compiled(catch.found, tmp_path)
    print(heads, num_tokens, usage)
    # Over codes four programs with 16 bytes on the stack were faster than three without. With 24,
    # since sums are scaled only where scores rise, their speed was not measured again.
    assert usage.stack <= (0 if scales is None else 24)
    assert usage.shared <= SHARED_MEMORY
    assert ("HGMMA" in listing) and (".BF16" in listing) == (half != "float16")
    assert "UTMALDG" in listing
    if is_prefill:  # queries, then weights in registers, are the M side
        assert "HGMMA.64x64x16" in listing
        assert re.search(rf"HGMMA.64x{head_dim}x16\S* R\d+, R\d+", listing)
    assert (merged.found is not None) == (num_splits > 0)


class _Prefill:
    """Stands for the kernel in CUDA C++."""

    def __init__(self, *, takes: bool, runs: bool) -> None:
        self.fallback = None if runs else "no NVRTC"
        self._takes, self._runs = takes, runs
        self.launched: list[tuple[int, bool]] = []

    def takes(self, *_: object) -> bool:
        return self._takes

    def attend(self, *arguments: Any, is_dependent: bool) -> bool:
        if self._runs:
            self.launched.append((arguments[-1], is_dependent))
        return self._runs


@pytest.mark.parametrize(
    ("num_tokens", "takes", "runs", "in_cuda"),
    [
        (2048, True, True, True),
        (256, True, True, False),
        (2048, False, True, False),
        (2048, True, False, False),
    ],
)
def test_large_steps_attend_in_cuda_where_that_kernel_runs(
    num_tokens: int, takes: bool, runs: bool, in_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    spec: Any = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128)
    options = {"PDL": True, "launch_pdl": True}
    splits = launchers._Splits(launchers.split_buffers([spec], 1, 1, "cpu"))
    prefill: Any = _Prefill(takes=takes, runs=runs)
    attention = launchers.HopperAttention(
        spec, splits, 16, options, 4, has_prefill=True, cuda_prefill=prefill
    )
    catches = [_Catch(kernels.attend) for kernels in (attention._prefill, attention._kernels)]
    monkeypatch.setattr(attention._prefill, "attend", catches[0])
    monkeypatch.setattr(attention._kernels, "attend", catches[1])
    keys = torch.empty((8, 8, 16, 128), dtype=torch.bfloat16)
    integers = torch.empty((5, num_tokens), dtype=torch.int32)
    inputs = launchers.AttentionInput(
        queries=torch.empty((num_tokens, 32, 128), dtype=torch.bfloat16),
        tables=integers[0],
        tiles=plain_attention.TokenTiles(*integers),
        out=torch.empty((num_tokens, 32 * 128), dtype=torch.float16),
    )
    attention.attend(inputs, launchers.LayerCache(keys, keys), launchers.LayerAttention(0.1), 0)
    assert prefill.launched == ([(num_tokens // 32 + 4, True)] if in_cuda else [])
    assert [catch.found is not None for catch in catches] == [
        num_tokens > 256 and not in_cuda,
        num_tokens <= 256,
    ]
    assert attention.fallback == prefill.fallback


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "query_dtype", "kv_dtype", "wanted"),
    [
        (128, 2, torch.bfloat16, torch.bfloat16, True),
        (128, 8, torch.bfloat16, torch.bfloat16, False),
        (64, 2, torch.bfloat16, torch.bfloat16, False),
        (256, 2, torch.bfloat16, torch.bfloat16, False),
        (128, 2, torch.float32, torch.float16, False),
        (128, 2, torch.bfloat16, torch.int8, False),
    ],
)
def test_the_kernel_in_cuda_is_compiled_for_models_it_is_made_for(
    head_dim: int,
    num_kv_heads: int,
    query_dtype: Any,
    kv_dtype: Any,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill: Any = _Prefill(takes=True, runs=True)
    made = _Made(prefill)
    monkeypatch.setattr(launchers, "CudaPrefill", made)
    for is_hopper in (True, False):  # without is another GPU, or QUIRE_CUDA_KERNELS=plain

        def runs_hopper_kernels(device: str, found: bool = is_hopper) -> bool:
            return found

        monkeypatch.setattr(launchers, "runs_hopper_kernels", runs_hopper_kernels)
        spec: Any = SimpleNamespace(num_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim)
        attention = launchers.attention_for(
            spec,
            max_split_tokens=1,
            max_splits=1,
            max_sequences=4,
            block_size=16,
            launch_options={},
            device="cpu",
            query_dtype=query_dtype,
            kv_dtype=kv_dtype,
        )
        own = getattr(attention, "_cuda_prefill", None)
        assert own is (prefill if wanted and is_hopper else None)
        assert attention.fallback is None


@pytest.mark.parametrize("is_plain", [False, True])
def test_layers_with_what_the_plain_kernel_alone_has_take_it_in_every_step(
    is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "runs_hopper_kernels", lambda device: True)
    spec: Any = SimpleNamespace(num_heads=32, num_kv_heads=32, head_dim=128)
    attention = launchers.attention_for(
        spec,
        max_split_tokens=1,
        max_splits=1,
        max_sequences=4,
        block_size=16,
        launch_options={},
        device="cpu",
        is_plain=is_plain,
    )
    wanted = launchers.PlainAttention if is_plain else launchers.HopperAttention
    assert type(attention) is wanted


class _Noted:
    """Stands for a kernel; nothing is launched."""

    def __init__(self) -> None:
        self.grid: Any = None
        self.settings: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **settings: Any) -> None:
            del arguments
            self.grid, self.settings = grid, settings

        return launch


def test_layers_of_other_heads_share_tiles_and_the_memory_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 4 31B's: heads of 256 run the Hopper kernel, those of 512 the plain one."""
    pretend()
    monkeypatch.setattr(launchers, "runs_hopper_kernels", lambda device: True)
    sizes: Any = {"max_split_tokens": 16, "max_splits": 4, "max_sequences": 32, "block_size": 16}
    specs: list[Any] = [
        SimpleNamespace(num_heads=32, num_kv_heads=16, head_dim=256),
        SimpleNamespace(num_heads=32, num_kv_heads=4, head_dim=512),
    ]
    kinds = [launchers.attention_for(x, launch_options={}, device="cpu", **sizes) for x in specs]
    sliding, full = kinds
    assert isinstance(sliding, launchers.HopperAttention)
    assert isinstance(full, launchers.PlainAttention)
    assert [x.tokens_per_tile(512, 0) for x in kinds] == [8, 2]
    assert [launchers.common_tile(kinds, n, 0) for n in (64, 512)] == [4, 8]
    assert launchers.common_tile(kinds, 16, 4) == 1
    assert launchers.common_tile([full], 512, 0) == 2
    kernels = _Noted(), _Noted()
    monkeypatch.setattr(sliding._kernels, "attend", kernels[0])
    monkeypatch.setattr(plain_attention, "attend", kernels[1])
    monkeypatch.setattr(sliding, "_descriptor", lambda *given: None)
    memory, integers = torch.empty(8 * 16 * 4096), torch.empty((5, 512), dtype=torch.int32)
    for spec, attention in zip(specs, kinds, strict=True):
        inputs = launchers.AttentionInput(
            queries=torch.empty((512, 32, spec.head_dim), dtype=torch.bfloat16),
            tables=integers[0],
            tiles=plain_attention.TokenTiles(*integers),
            out=torch.empty((512, 32 * spec.head_dim)),
            tile_tokens=8,
        )
        cache = launchers.LayerCache(*[memory.view(8, -1, 16, spec.head_dim)] * 2)
        attention.attend(inputs, cache, launchers.LayerAttention(1.0), 0)
    assert kernels[0].grid == (16, 512 // 8 + 32, 1)
    assert kernels[1].grid == (512 * 4, 4, 1)  # four programs a tile
    assert [kernel.settings["SHAPE"].block_heads for kernel in kernels] == [16, 8]
    assert kernels[1].settings["PARTS"] == 4


class _Made:
    """Stands for the class CudaPrefill."""

    HEAD_DIM = launchers.CudaPrefill.HEAD_DIM
    GROUPS = launchers.CudaPrefill.GROUPS

    def __init__(self, kernel: _Prefill) -> None:
        self._kernel = kernel

    def __call__(self) -> _Prefill:
        return self._kernel


@pytest.mark.parametrize("kept", ["int8", "uint8"])
@pytest.mark.parametrize("num_tokens", [4, 2048])
def test_attention_over_codes_beside_queries_in_float32_fits_its_registers(
    num_tokens: int, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As BitNet's, of 20 heads and 5 KV heads of 128."""
    pretend()
    spec: Any = SimpleNamespace(num_heads=20, num_kv_heads=5, head_dim=128)
    options = {"PDL": True, "launch_pdl": True}
    splits = launchers._Splits(launchers.split_buffers([spec], num_tokens, 1, "cpu"))
    attention = launchers.HopperAttention(spec, splits, 16, options, 256)
    catch = _Catch(attention._kernels.attend)
    monkeypatch.setattr(attention._kernels, "attend", catch)
    keys = torch.empty((8, 5, 16, 128), dtype=getattr(torch, kept))
    cache = launchers.LayerCache(keys, keys, torch.empty((8, 5, 2, 16)))
    integers = torch.empty((5, num_tokens), dtype=torch.int32)
    inputs = launchers.AttentionInput(
        queries=torch.empty((num_tokens, 20, 128)),
        tables=integers[0],
        tiles=plain_attention.TokenTiles(*integers),
        out=torch.empty((num_tokens, 20 * 128)),
    )
    attention.attend(inputs, cache, launchers.LayerAttention(0.1), 0)
    usage, listing = compiled(catch.found, tmp_path)
    print(kept, num_tokens, usage)
    assert usage.stack == 0
    assert usage.shared <= SHARED_MEMORY
    assert "HGMMA" in listing


@pytest.mark.parametrize(
    ("half", "heads", "head_dim"),
    [
        *(("bfloat16", 4, 32), ("float16", 4, 32), ("bfloat16", 8, 256), ("bfloat16", 64, 256)),
        *(("int8", 4, 32), ("uint8", 4, 32), ("uint8", 8, 128)),
    ],
)
def test_the_plain_attention_compiles_for_either_cache(
    half: str, heads: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interpreter runs may still not compile. Here with sinks, a soft cap and a window."""
    pretend()
    spec: Any = SimpleNamespace(num_heads=heads, num_kv_heads=2, head_dim=head_dim)
    splits = launchers._Splits(launchers.split_buffers([spec], 4, 1, "cpu"))
    options = {"PDL": True, "launch_pdl": True}
    attention = launchers.PlainAttention(spec, splits, 16, options, exact=False)
    catch = _Catch(plain_attention.attend)
    monkeypatch.setattr(plain_attention, "attend", catch)
    keys = torch.empty((8, 2, 16, head_dim), dtype=getattr(torch, half))
    query_type = torch.float32 if half == "float16" else torch.bfloat16
    integers = torch.empty((5, 4), dtype=torch.int32)
    inputs = launchers.AttentionInput(
        queries=torch.empty((4, heads, head_dim), dtype=query_type),
        tables=integers[0],
        tiles=plain_attention.TokenTiles(*integers),
        out=torch.empty((4, heads * head_dim)),
    )
    layer = launchers.LayerAttention(0.1, 100, 50.0, torch.empty(heads))
    scales = torch.empty((8, 2, 2, 16)) if keys.element_size() == 1 else None
    attention.attend(inputs, launchers.LayerCache(keys, keys, scales), layer, 0)
    usage, _ = compiled(catch.found, tmp_path)
    print(heads, head_dim, usage)
    assert usage.stack <= (8 if scales is not None else 0) or head_dim > 128
    assert usage.shared <= SHARED_MEMORY


MIXTURE = Experts(
    count=128,
    num_used=8,
    size=768,
    activation=Activation.CLAMPED_SWIGLU,
    router=Router(normalises=True, has_bias=True),
)


def expert_call(num_tokens: int, tile_tokens: int, part: Experts = MIXTURE) -> experts._Call:
    integers = torch.empty((10, 64), dtype=torch.int32)
    tiles = expert_kernels.Tiles(*integers[:7])
    pairs = expert_kernels.Pairs(integers[7], torch.empty(64), *integers[8:])
    return experts._Call(part, tiles, pairs, num_tokens, 8 * num_tokens, tile_tokens)


@pytest.mark.parametrize("num_tokens", [1, 16, 128, 256, 512, 4096])
@pytest.mark.parametrize(
    ("format_name", "ends_in_half", "gated"),
    [
        *((name, False, True) for name in GROUPED),
        *((name, False, False) for name in ("Q4_K", "MXFP4", "BF16", "IQ2_S")),
        *((name, False, False) for name in ("E4M3_128", "NVFP4_128")),
        *(("MXFP4", True, gated) for gated in (False, True)),
    ],
)
def test_a_grouped_gemm_fits_its_registers_and_runs_on_tensor_cores(
    format_name: str,
    ends_in_half: bool,
    gated: bool,
    num_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend()
    gemm = experts.HopperExperts(HopperGemm(), dependent_launch=True)
    catch = _Catch(gemm._kernels.expert_gemm)
    monkeypatch.setattr(gemm._kernels, "expert_gemm", catch)
    rows = 1536
    planes = made(format_name, 4 * rows, gated=False).segments[0].planes
    stack = Stack(planes, rows, rows, torch.empty(4 * rows), 512 - 128 * ends_in_half)
    tile_tokens = gemm.tile_tokens(MIXTURE, num_tokens)
    call = expert_call(num_tokens, tile_tokens)
    tokens = torch.empty((num_tokens * 8, 512), dtype=torch.float16)
    if gated:
        out = torch.empty((num_tokens * 8, rows // 2), dtype=torch.float16)
        gemm.multiply_gated(call, stack, tokens, out)
    else:
        gemm.multiply_weighed(call, stack, tokens, torch.empty((8, num_tokens, rows)))
    usage, listing = compiled(catch.found, tmp_path)
    print(format_name, num_tokens, tile_tokens, usage)
    assert usage.stack == 0
    # As many programs as the launch counts on run at once, and every size has its instruction.
    assert usage.shared * max(1, catch.grid[0] // MULTIPROCESSORS) <= SHARED_MEMORY
    assert usage.can_launch
    assert not is_serialised(catch.found, tmp_path)
    for size in experts.token_sizes(planes.layout, tile_tokens):
        assert f"64x{size}x16" in listing
    if format_name == "MXFP4":  # 16 for a block, 8 more for the half that is the last one
        [*_, size] = experts.token_sizes(planes.layout, tile_tokens)
        assert listing.count(f"HGMMA.64x{size}x16") % (24 if ends_in_half else 16) == 0


GEMMA4 = replace(MIXTURE, activation=Activation.GELU_TANH, router=Router(normalises=True))
NEMOTRON = replace(
    MIXTURE, activation=Activation.RELU2, router=Router(normalises=True), is_gated=False
)


@pytest.mark.parametrize("num_tokens", [1, 16, 256, 4096])
@pytest.mark.parametrize("format_name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16", "IQ3_S"])
@pytest.mark.parametrize("part", [GEMMA4, NEMOTRON], ids=["gelu of gates", "relu2 without gates"])
def test_a_grouped_gemm_with_another_activation_fits_its_registers(
    part: Experts,
    format_name: str,
    num_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend()
    gemm = experts.HopperExperts(HopperGemm(), dependent_launch=True)
    catch = _Catch(gemm._kernels.expert_gemm)
    monkeypatch.setattr(gemm._kernels, "expert_gemm", catch)
    planes = made(format_name, 4 * 1536, gated=False).segments[0].planes
    stack = Stack(planes, 1536, 1536, None, 512)
    call = expert_call(num_tokens, gemm.tile_tokens(part, num_tokens), part)
    tokens = torch.empty((num_tokens * 8, 512), dtype=torch.float16)
    out = torch.empty((num_tokens * 8, 768 if part.is_gated else 1536), dtype=torch.float16)
    gemm.multiply_gated(call, stack, tokens, out)
    usage, _ = compiled(catch.found, tmp_path)
    print(format_name, num_tokens, usage)
    assert usage.stack <= 16  # of what ends a tile
    assert usage.shared * max(1, catch.grid[0] // MULTIPROCESSORS) <= SHARED_MEMORY
    assert not is_serialised(catch.found, tmp_path)


@pytest.mark.parametrize("tile_tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("ends_in_half", [False, True])
def test_both_grouped_gemms_in_one_launch_fit_their_registers(
    ends_in_half: bool, tile_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    gemm = experts.HopperExperts(HopperGemm(), dependent_launch=True)
    catch = _Catch(gemm._pair_kernels.expert_pair)
    monkeypatch.setattr(gemm._pair_kernels, "expert_pair", catch)
    rows = 1536
    planes = made("MXFP4", 4 * rows, gated=False).segments[0].planes
    stack = Stack(planes, rows, rows, torch.empty(4 * rows), 512 - 128 * ends_in_half)
    weights = ExpertWeights(MIXTURE, RouterWeights(planes, planes, 0, None, None), stack, stack)
    tokens = torch.empty((512, 512), dtype=torch.float16)
    gated = torch.empty((512, rows // 2), dtype=torch.float16)
    call = expert_call(64, tile_tokens)
    gemm.multiply(call, weights, tokens, gated, torch.empty((8, 64, rows)))
    usage, listing = compiled(catch.found, tmp_path)
    print(tile_tokens, usage)
    assert usage.stack == 0
    assert usage.shared * max(1, catch.grid[0] // MULTIPROCESSORS) <= SHARED_MEMORY
    assert not is_serialised(catch.found, tmp_path)
    for size in experts.token_sizes(planes.layout, tile_tokens):
        assert f"64x{size}x16" in listing


@pytest.mark.parametrize("count", [32, 128, 512])
def test_routing_and_grouping_compile_without_spilled_registers(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    part = replace(MIXTURE, count=count)
    names = ["score_experts", "choose_experts", "group_tokens"]
    names += ["multiply_gated", "multiply_weighed"]
    caught = {name: _Catch(getattr(expert_kernels, name)) for name in names}
    for name, catch in caught.items():
        monkeypatch.setattr(expert_kernels, name, catch)
    planes = made("Q4_K", 1536, gated=False).segments[0].planes
    stack = Stack(planes, 1536 // count, 1536 // count, None, 512)
    router = torch.empty((count, 512), dtype=torch.float16)
    weights = ExpertWeights(part, RouterWeights(router, router, 0, None, None), stack, stack)
    options = {"PDL": True, "launch_pdl": True}
    runner = experts.ExpertRunner([part], 512, 64, PortableGemm(exact=False), options, "cpu")
    runner._exact = False
    runner._gemm = experts.PortableExperts(exact=False)
    runner.run(weights, torch.empty((64, 512), dtype=torch.float16), torch.empty((8, 64, 512)), 64)
    for name, catch in caught.items():
        usage, _ = compiled(catch.found, tmp_path)
        print(name, count, usage)
        assert usage.stack == 0


UNGATED = ("starcoder2", "nemotron", "gpt2", "apertus", "bloom")
GATED = ("afmoe", "qwen35")  # what attention leaves
STATES = ("qwen35", "granitehybrid", "lfm2", "nemotron_h_moe", "falcon-h1", "mamba2")


@pytest.mark.parametrize(
    "case",
    sorted(
        {"gemma2", "olmo2", "command-r", "ministral3", "qwen2moe", "hunyuan-dense"}
        | {"gemma4", "gemma4-experts", "llama4", "phimoe", "bailingmoe2", "deepseek2"}
        | {*UNGATED, *GATED, *STATES}
    ),
)
def test_every_kernel_of_a_familys_step_compiles(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms after halves and of either kind, over heads or projections; soft caps; parallel halves;
    feed-forwards without a gate; queries scaled by position; learned positions; norms
    after rope; ALiBi, and a norm after the embedding; inputs of layers; experts beside a dense
    feed-forward, of weighed inputs, chosen by groups or by a SparseMixer; chunks; gates on what
    attention leaves; every kind of state, beside attention, too; layers of one half; experts
    without gates."""
    pretend()
    options = {"PDL": True, "launch_pdl": True}
    names: set[str] = set()
    has_plain: set[bool] = set()

    def compile_only(self: Any, *arguments: Any, **settings: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *arguments, **{**settings, "warmup": True})

    def plain(spec: Any, **settings: Any) -> launchers.Attention:
        has_plain.add(settings["is_plain"])
        splits = launchers._Splits(
            launchers.split_buffers([spec], settings["max_split_tokens"], 4, "cpu")
        )
        dims = settings["latent_rope_dims"]
        return launchers.PlainAttention(
            spec, splits, 16, options, exact=False, latent_rope_dims=dims
        )

    run = triton.JITFunction.run
    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(decoders, "attention_for", plain)
    monkeypatch.setattr(decoders.Decoder, "_launch_options", lambda self: options)
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        weights = load_weights(model.spec, model.tensors, "cpu")
    limits = decoders.Limits(
        num_tokens=4, num_rows=4, max_split_tokens=4, max_context=64, num_states=2
    )
    num_fields = decoders.num_fields(1, has_states=True)
    integers = torch.zeros((num_fields, 4), dtype=torch.int32)
    layout = one_group(model.spec)
    decoder = decoders.Decoder(
        model.spec, weights, HopperGemm(), limits, integers[0], "cpu", layout
    )
    blocks = decoders.KVBlocks(model.spec, layout, 4, "cpu", decoder.kv_dtype)
    body = decoders.BodyInput(integers, integers[0])
    decoder.run_body(decoders.BodyShape(4, 4), body, blocks)
    decoder.run_head(4, integers[0], integers[1])
    latent = {"store_latent", "divide_queries", "multiply_heads"}
    assert names >= {"embed", "add_and_norm", "gemm"}
    attends = {"attend", "merge_splits"} | (latent if case == "deepseek2" else {"rope_and_store"})
    assert names & attends == (set() if case == "mamba2" else attends)
    assert (True in has_plain) == (case in ("bloom", "llama4", "deepseek2"))
    assert ("cap_logits" in names) == (case in ("gemma2", "gemma4"))
    assert ("gate_layer_input" in names) == ("make_layer_inputs" in names) == (case == "gemma4")
    assert ("add_normed" in names) == (case == "gemma4-experts")
    # Where inputs are weighed, also in steps of so few tokens.
    assert ("group_tokens" in names) == (case == "llama4")
    # In a shared expert, and where gates have a scale of their own.
    assert ("gate" in names) == (case in (*UNGATED, "nemotron_h_moe", "falcon-h1"))
    assert ("norm_hidden" in names) == (case == "bloom")
    assert ("gate_attention" in names) == (case in GATED)
    assert ("recur" in names) == (case in STATES and case != "lfm2")
    assert ("convolve_alone" in names) == (case == "lfm2")
    assert ("scale_by_gate" in names) == (case == "qwen2moe")


@pytest.mark.parametrize("vocabulary", [300, 32_000, 49_152, 128_256, 262_144])
def test_the_samplers_kernels_keep_to_their_registers(
    vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    caught: dict[str, _Catch] = {}
    for module in (sampling_kernels, scoring_kernels):
        for name in ("adjust", "find_bounds", "narrow", "weigh_or_list", "choose"):
            if name in vars(module):
                caught[name] = _Catch(getattr(module, name))
        for name in [name for name in vars(module) if name.startswith("score_")]:
            caught[name] = _Catch(getattr(module, name))
        for name in caught.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, caught[name])
    sampled = torch.zeros((2, 2), dtype=torch.int32)
    sampler = Sampler(torch.zeros((2, vocabulary)), torch.zeros(2, dtype=torch.int32), sampled)
    sampler._launch_with_rounds(2)
    sampler._launch_scores(2)
    assert len(caught) == 10
    for name, catch in caught.items():
        usage, _ = compiled(catch.found, tmp_path)
        print(name, vocabulary, usage)
        assert usage.stack == 0 or vocabulary == 300  # whose rows are short: 8 bytes cost nothing
