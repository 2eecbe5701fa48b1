"""Configurations: what is written reads back, and what is wrong in a file is named."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.llm.assembly import (
    MAX_CONFIGURATION_BYTES,
    configuration_text,
    read_configuration,
)
from quire.llm.devices import Options


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quire.toml"


def test_what_is_written_reads_back(file: Path) -> None:
    engine: dict[str, int | float | str] = {"max_batch_size": 600, "slo_itl_ms": 7.5}
    run: dict[str, int | float | str] = {"device": "cpu", "threads": 4, "kv_memory": 'a"ü😀'}
    run |= {"kv_cache_dtype": "int8", "i2s_packing": "arm"}
    file.write_text(configuration_text({"engine": engine, "run": run}, ["one\ntwo"]))
    assert file.read_text().startswith("# one two\n\n[engine]\nmax_batch_size = 600\n")
    options = read_configuration(file)
    assert options == Options(
        device="cpu",
        threads=4,
        kv_memory='a"ü😀',
        kv_cache_dtype="int8",
        i2s_packing="arm",
        max_batch_size=600,
        engine={"slo_itl_ms": 7.5},
    )
    assert options.engine_config().max_batch_size == 600


def test_an_empty_file_is_the_usual_options(file: Path) -> None:
    file.write_text("")
    assert read_configuration(file) == Options()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nbatch = 3", r"\[engine\] has no 'batch'; there are aging_s, "),
        (
            "[run]\nmax_batch_size = 3",
            r"\[run\] has no 'max_batch_size'; there are chat_template, device, ",
        ),
        ("[run]\nkv_cache_dtype = 8", r"\[run\] kv_cache_dtype is 8, which is of the wrong type"),
        (
            "[run]\nkv_cache_dtype = 'f8'",
            "kv_cache_dtype must be one of auto, f16, fp8, int8, got 'f8'",
        ),
        ("[run]\ni2s_packing = 'neon'", "i2s_packing must be one of x86, arm, got 'neon'"),
        ("[server]\nport = 1", r"'server' is unknown; there are the tables \[engine\] and \[run\]"),
        ("engine = 3", "'engine' is unknown"),
        ("[engine]\nmax_batch_size = 0", "max_batch_size must be an integer of at least 1, got 0"),
        ("[engine]\nmax_batch_size = 1.5", "max_batch_size must be an integer"),
        ("[engine]\nmax_batch_size = true", "max_batch_size is True, which is of the wrong type"),
        ("[engine]\nfairness = 1", "fairness is 1, which is of the wrong type"),
        ("[engine]\nkey_weights = 3", "key_weights is 3, which is of the wrong type"),
        ("[engine.key_weights]\na = 0", "key_weights"),
        ("[engine]\nmax_batch_size = 9\nmax_step_tokens = 4", "must be at least max_batch_size"),
        ("[run]\nthreads = 'two'", "threads is 'two', which is of the wrong type"),
        ("[run]\nmax_context = 1", "max_context must hold a prompt"),
        ("[run", "is no TOML"),
        ("a = " + "[" * 5000, "is no TOML"),
        ("#" * (MAX_CONFIGURATION_BYTES + 1), "is longer than"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(text: str, message: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_configuration(file)
    assert str(file) in str(caught.value)


def test_bytes_that_are_no_text_and_files_that_are_not_there(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_configuration(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no TOML"):
        read_configuration(file)


def test_an_unknown_name_is_not_written() -> None:
    with pytest.raises(ConfigError, match="has no 'batch'"):
        configuration_text({"engine": {"batch": 3}})


def test_only_a_gpu_may_do_without_invariance() -> None:
    with pytest.raises(ConfigError, match="the reference executor has one order of summation"):
        Options(device="reference", invariant=False).engine_config()
    with pytest.raises(ConfigError, match="invariant must be true or false, got 0"):
        Options(invariant=0)  # type: ignore[arg-type]
