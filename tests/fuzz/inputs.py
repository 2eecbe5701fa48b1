"""What the fuzzers feed the readers: how bytes become a model in memory, and inputs to start from.

A feed gives one input to a reader, as the files of a model. It returns whether all of it was read;
an input that is refused with one of quire's errors gives False. Whatever else a reader raises is a
find.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.fuzz.memory_files import MemoryFiles
from tests.loader import gguf_bytes as build
from tests.loader.hostile import use
from tests.loader.safetensors_bytes import file_bytes, with_header

from quire.core.errors import ModelFileError, RequestError, UnsupportedModelError
from quire.loader.files import open_model_file
from quire.loader.metadata import Metadata
from quire.loader.reading import parse_json_object
from quire.model.config_spec import spec_from_config
from quire.model.loading import end_token_ids, load_model, read_tokenizer
from quire.model.quantised import linears_joined
from quire.quant.formats import FORMATS
from quire.tokenizer import Tokenizer

CORPUS = Path(__file__).parent / "corpus"
Feed = Callable[[bytes], bool]
_TEXT = "ab <s> a😀\n\n12 abba</s>"


class Target(NamedTuple):
    """A reader that is fuzzed."""

    feed: Feed
    seeds: Callable[[], list[bytes]]
    is_json: bool  # whether inputs can be mutated as JSON


def _read(reader: Callable[[], object]) -> bool:
    try:
        reader()
    except (ModelFileError, UnsupportedModelError) as error:
        assert str(error)
        return False
    return True


def feed_gguf(content: bytes) -> bool:
    """Open the bytes as the first of two parts; the second is sound."""
    names = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    files = MemoryFiles(dict(zip(names, (content, _part(1)), strict=True)))
    return _read(lambda: use(open_model_file(files.FOLDER / names[0], files)))


def feed_gguf_model(content: bytes) -> bool:
    """Open the bytes as a model: its spec, its tokenizer, and some text through that."""
    files = MemoryFiles({"m.gguf": content})

    def read() -> None:
        model = load_model(files.FOLDER / "m.gguf", files)
        model.spec.rope.frequencies()
        tokenizer = read_tokenizer(model)
        end_token_ids(model, tokenizer)
        if tokenizer is not None:
            _tokenize(tokenizer)

    return _read(read)


def feed_safetensors(content: bytes) -> bool:
    """Open a folder in which the bytes are, as the first of them says, one of its files."""
    contents = dict(_SOUND_FILES)
    kind, rest = content[:1], content[1:]
    if kind == b"F":
        contents["model.safetensors"] = rest
    elif kind == b"H":  # a header with its true length, and data after it
        header, _, data = rest.partition(b"\0")
        contents["model.safetensors"] = with_header(header, data)
    elif kind == b"C":
        contents["config.json"] = rest
    else:
        del contents["model.safetensors"]
        contents["model.safetensors.index.json"] = rest
    files = MemoryFiles(contents)
    return _read(lambda: use(open_model_file(files.FOLDER, files)))


def feed_quantised(content: bytes) -> bool:
    """A quantization_config, and tensors by type and shape, whose bytes are `shape` as I64s where
    the name says so, otherwise all `fill`: every weight of the linears that they make is read."""

    def read() -> None:
        given = Metadata("input", parse_json_object(content, "input"))
        fill, entries = bytes([given.integer("fill", low=0, high=255)]), given.section("tensors")
        told = [number & 0xFFFFFFFF for number in given.integers("shape")]
        header: dict[str, object] = {}
        data = b""
        for name in entries:
            entry = entries.section(name)
            size = _TYPE_BYTES.get(entry.text("dtype"), 1) * math.prod(entry.integers("shape"))
            if not 0 <= size <= 1 << 16:
                raise entry.error("shape", "makes too much")
            is_told = name.endswith("_shape") and size == 8 * len(told)
            header[name] = {**entry, "data_offsets": [len(data), len(data) + size]}
            data += np.array(told, "<i8").tobytes() if is_told else size * fill
        file = with_header(json.dumps(header).encode(), data)
        files = MemoryFiles({"config.json": b"{}", "model.safetensors": file})
        tensors = open_model_file(files.FOLDER, files).tensors
        for tensor in linears_joined(
            {"quantization_config": given.get("config")}, tensors
        ).values():
            tensor.to_float32()

    return _read(read)


_TYPE_BYTES = {"F32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2}


def feed_tokenizer_json(content: bytes) -> bool:
    """A tokenizer.json, and behind a zero byte a tokenizer_config.json."""
    description, _, config = content.partition(b"\0")

    def read() -> None:
        parsed = parse_json_object(config, "tokenizer_config.json") if config else {}
        _tokenize(Tokenizer.from_json(description, parsed, parsed))

    return _read(read)


def feed_config(content: bytes) -> bool:
    """A config.json, as far as the frequencies of its rope."""

    def read() -> None:
        spec = spec_from_config(parse_json_object(content, "config.json"))
        if spec.rope.dims <= 256:  # what there may be of them takes its time
            spec.rope.frequencies()

    return _read(read)


def _tokenize(tokenizer: Tokenizer) -> None:
    for parse_special in (True, False):
        try:
            tokens = tokenizer.encode(_TEXT, parse_special=parse_special, limit=1000)
        except RequestError:
            continue
        tokenizer.decode(tokens, skip_special=parse_special)
    tokenizer.token_text(tokenizer.vocabulary_size - 1)


# ---- inputs to start from


def gguf_seeds() -> list[bytes]:
    strings = [build.string("token"), build.string(b"\xff"), build.string("")]
    nested = build.array(build.ARRAY, [build.array(build.U8, [b"\1"]), build.array(8, strings)])
    fields = [
        *(build.pair(f"k{kind}", kind, build.number(kind, 1)) for kind in build.CODES),
        build.pair("general.name", build.STRING, build.string("name")),
        build.pair("tokens", build.ARRAY, build.array(build.STRING, strings)),
        build.pair("flags", build.ARRAY, build.array(build.BOOL, [b"\0", b"\1"])),
        build.pair("nested", build.ARRAY, nested),
        build.unsigned("general.alignment", 64),
    ]
    infos = [
        build.tensor_info("token_embd.weight", [32, 2], 2, 0),
        build.tensor_info("output_norm.weight", [4], 0, 64),
        build.tensor_info("output.weight", [256, 1], 12, 128),
        build.tensor_info("deep", [2, 2, 2, 2], 1, 320),
    ]
    whole = build.Parts(fields, infos, bytes(352), alignment=64)
    return [whole.build(), _part(0), _block_of_every_format(), build.Parts(version=2).build()]


def _block_of_every_format() -> bytes:
    infos, content = [], b""
    for kind in FORMATS:
        if kind.ggml_type < 0:
            continue
        shape = [kind.block_size, 1]
        infos.append(build.tensor_info(kind.name, shape, kind.ggml_type, len(content)))
        content += bytes(kind.block_bytes + kind.tail_bytes)
        content += bytes(-len(content) % 32)
    return build.Parts([], infos, content).build()


def _part(number: int) -> bytes:
    fields = [
        build.unsigned("split.no", number, build.U16),
        build.unsigned("split.count", 2, build.U16),
        build.unsigned("split.tensors.count", 2, build.I32),
    ]
    info = build.tensor_info(f"part{number}", [1])
    return build.Parts(fields, [info], struct.pack("<f", 1)).build()


_VOCABULARY = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba", "Ġ", "Ċ", "<0x41>", "▁", "▁ab", "1"]
_SIZES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 4,
    "feed_forward_length": 4,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "rope.dimension_count": 2,
    "vocab_size": len(_VOCABULARY),
}


def gguf_model_seeds() -> list[bytes]:
    """The smallest models with a vocabulary of each kind, with and without scaled rope; the last
    one as Ollama's converters write them."""
    byte_level = [
        _text_field("tokenizer.ggml.model", "gpt2"),
        _text_field("tokenizer.ggml.pre", "qwen2"),
        _texts("tokenizer.ggml.merges", ["a b", "b a"]),
    ]
    sentencepiece = [
        _text_field("tokenizer.ggml.model", "llama"),
        _numbers("tokenizer.ggml.scores", build.F32, [-float(n) for n in range(len(_VOCABULARY))]),
        build.pair("tokenizer.ggml.add_space_prefix", build.BOOL, b"\1"),
    ]
    yarn = [
        _text_field("llama.rope.scaling.type", "yarn"),
        build.pair("llama.rope.scaling.factor", build.F32, build.number(build.F32, 4.0)),
    ]
    without = [_text_field("tokenizer.ggml.model", "none")]
    more = (byte_level, sentencepiece, [*byte_level, *yarn], without)
    scaling = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0}
    ollama = [
        *(
            build.pair(f"mistral3.rope.scaling.{key}", build.F32, build.number(build.F32, value))
            for key, value in scaling.items()
        ),
        _text_field("mistral3.rope.scaling.type", "yarn"),
        build.unsigned("mistral3.rope.scaling.original_context_length", 16),
        build.unsigned("mistral3.vision.block_count", 1),
    ]
    sees = {"v.patch_conv": (4, 4)}
    return [
        *(_model(fields) for fields in more),
        _model([*byte_level, *ollama], "mistral3", sees),
    ]


def _model(
    more: list[bytes],
    architecture: str = "llama",
    more_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> bytes:
    kinds = [2, 3, 3, *([1] * (len(_VOCABULARY) - 3))]
    kinds[9] = 6
    fields = [
        _text_field("general.architecture", architecture),
        *(build.unsigned(f"{architecture}.{key}", size) for key, size in _SIZES.items()),
        build.pair(
            f"{architecture}.attention.layer_norm_rms_epsilon",
            build.F32,
            build.number(build.F32, 1e-5),
        ),
        _texts("tokenizer.ggml.tokens", _VOCABULARY),
        _numbers("tokenizer.ggml.token_type", build.I32, kinds),
        build.unsigned("tokenizer.ggml.bos_token_id", 1),
        build.unsigned("tokenizer.ggml.eos_token_id", 2),
        _text_field("tokenizer.chat_template", "{{ messages[0].content }}"),
        *more,
    ]
    shapes = {"token_embd": (4, len(_VOCABULARY)), "output_norm": (4,), "blk.0.attn_norm": (4,)}
    shapes |= {"blk.0.ffn_norm": (4,), "blk.0.attn_q": (4, 4), "blk.0.attn_k": (4, 2)}
    shapes |= {"blk.0.attn_v": (4, 2), "blk.0.attn_output": (4, 4), "blk.0.ffn_gate": (4, 4)}
    shapes |= {"blk.0.ffn_up": (4, 4), "blk.0.ffn_down": (4, 4)}
    shapes |= more_shapes or {}
    infos, offset = [], 0
    for name, shape in shapes.items():
        infos.append(build.tensor_info(f"{name}.weight", shape, 0, offset))
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    return build.Parts(fields, infos, bytes(offset)).build()


def _text_field(key: str, text: str) -> bytes:
    return build.pair(key, build.STRING, build.string(text))


def _texts(key: str, texts: list[str]) -> bytes:
    array = build.array(build.STRING, [build.string(text) for text in texts])
    return build.pair(key, build.ARRAY, array)


def _numbers(key: str, kind: int, values: list[Any]) -> bytes:
    array = build.array(kind, [build.number(kind, value) for value in values])
    return build.pair(key, build.ARRAY, array)


def safetensors_seeds() -> list[bytes]:
    names = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    entries = {
        name: {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8 * at, 8 * at + 8]}
        for at, name in enumerate(names)
    }
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    return [
        b"F" + _SOUND_FILES["model.safetensors"],
        b"H" + json.dumps(entries).encode() + b"\0" + bytes(16),
        b"H" + json.dumps({"__metadata__": {"a": "b"}}).encode(),
        b"C" + json.dumps({"model_type": "llama", "n": [1, 2.5, None, True, {}]}).encode(),
        b"I" + json.dumps(index).encode(),
    ]


def quantised_seeds() -> list[bytes]:
    def seed(config: object, fill: int, **parts: tuple[str, list[int]]) -> bytes:
        tensors = {f"a.{part}": {"dtype": x, "shape": shape} for part, (x, shape) in parts.items()}
        whole = {"config": config, "fill": fill, "shape": [3, 128], "tensors": tensors}
        return json.dumps(whole).encode()

    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    words = {"qweight": ("I32", [128, 2]), "qzeros": ("I32", [2, 2]), "scales": ("F16", [2, 16])}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    columns = words | {"qweight": ("I32", [16, 16])}
    whole = {"qzeros": ("I32", [1, 2]), "scales": ("F16", [1, 16]), "g_idx": ("I32", [128])}
    group = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    packed = {"weight_packed": ("I32", [3, 16]), "weight_scale": ("F16", [3, 4])}
    packed |= {"weight_shape": ("I64", [2]), "weight_zero_point": ("I32", [1, 4])}
    e2m1 = {"weight": ("U8", [3, 64]), "weight_scale": ("F8_E4M3", [3, 8])}
    divided = {"weight_packed": e2m1["weight"], "weight_scale": e2m1["weight_scale"]}
    return [
        seed(
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            0x22,
            weight_scale_2=("F32", []),
            **e2m1,
        ),
        seed(compressed, 0x22, weight_global_scale=("F32", [1]), **divided),
        seed(compressed, 0x22, **divided | {"weight_scale": ("U8", [3, 4])}),
        seed(blocks, 0, weight=("F8_E4M3", [3, 256]), weight_scale_inv=("F32", [1, 2])),
        seed({"quant_method": "awq", "bits": 4, "group_size": 64}, 0x77, **words),
        seed(gptq | {"sym": True}, 0x77, **columns),
        seed(gptq | {"sym": False, "group_size": -1, "desc_act": True}, 0, **columns | whole),
        seed(compressed, 0, weight=("I8", [3, 128]), weight_scale=("BF16", [3, 1])),
        seed(compressed, 0x22, **packed),
        seed(compressed, 0, weight=("F16", [2, 2])),
    ]


_WEIGHTS = {"model.norm.weight": np.ones(2, np.float32)}
_SOUND_FILES = {
    "config.json": b"{}",
    "model.safetensors": file_bytes(_WEIGHTS),
    "a.safetensors": file_bytes(_WEIGHTS),
}


def tokenizer_json_seeds() -> list[bytes]:
    """Byte-level, as Qwen's is, and SentencePiece-like, as Llama 2's is."""
    ids = {text: token for token, text in enumerate(_VOCABULARY)}
    special = [
        {"id": ids[text], "content": text, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for text in ("<unk>", "<s>", "</s>")
    ]
    model = {"type": "BPE", "vocab": ids, "merges": [["a", "b"], ["b", "a"]]}
    byte_level = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            ],
        },
        "post_processor": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": model | {"ignore_merges": True},
    }
    template = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    sentencepiece = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": model | {"unk_token": "<unk>", "byte_fallback": True},
    }
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    config |= {"chat_template": [{"name": "default", "template": "x"}], "eos_token_id": [2]}
    first, second = (
        json.dumps(one, ensure_ascii=False).encode() for one in (byte_level, sentencepiece)
    )
    return [first, second + b"\0" + json.dumps(config).encode()]


def config_seeds() -> list[bytes]:
    common = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
    common |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    yarn = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "truncate": True}
    configs: list[dict[str, Any]] = [
        {"model_type": "llama", "rope_scaling": llama3, "tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": 16, "head_dim": 4, "rms_norm_eps": 1e-6},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
        | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "qwen3", "rope_parameters": yarn, "attention_bias": False},
        {"model_type": "bitnet", "hidden_act": "relu2", "rope_theta": 5e5},
    ]
    return [json.dumps(common | config).encode() for config in configs]


TARGETS = {
    "gguf": Target(feed_gguf, gguf_seeds, is_json=False),
    "gguf_model": Target(feed_gguf_model, gguf_model_seeds, is_json=False),
    "safetensors": Target(feed_safetensors, safetensors_seeds, is_json=True),
    "quantised": Target(feed_quantised, quantised_seeds, is_json=True),
    "tokenizer_json": Target(feed_tokenizer_json, tokenizer_json_seeds, is_json=True),
    "config": Target(feed_config, config_seeds, is_json=True),
}


def inputs_of(name: str) -> list[bytes]:
    """What a fuzzer starts from: the seeds, and what earlier runs kept."""
    kept = sorted((CORPUS / name).glob("*")) if (CORPUS / name).is_dir() else []
    return [*TARGETS[name].seeds(), *(path.read_bytes() for path in kept)]
