"""Receipts come back as they were written, and broken ones are refused by the field's name."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.sound_receipt import is_valid_to_jsonschema, make_receipt

from quire_bench.receipts import (
    ReceiptError,
    as_data,
    deviation,
    now,
    read,
    read_folder,
    schema,
    thinned,
    validate,
    write,
)

SOUND = as_data(make_receipt())


def test_a_receipt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write(make_receipt(), tmp_path / "new" / "receipts")
    assert as_data(read(path)) == SOUND
    assert is_valid_to_jsonschema(json.loads(path.read_text()))


def test_its_file_is_named_by_kind_model_and_time_and_is_alone(tmp_path: Path) -> None:
    path = write(make_receipt(), tmp_path)
    assert path.name.startswith("throughput-dummy-tiny-Q8_0-20260102T030405Z-")
    assert list(tmp_path.iterdir()) == [path]


def test_two_receipts_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    assert write(make_receipt(seed=1), tmp_path) != write(make_receipt(seed=2), tmp_path)


def test_the_folder_of_a_models_path_stays_out_of_the_name(tmp_path: Path) -> None:
    model = dict(SOUND["model"], name="some/folder/model v1.gguf")
    assert write(make_receipt(model=model), tmp_path).name.startswith("throughput-model-v1.gguf-")


def test_a_folder_is_read_whole_or_by_kind(tmp_path: Path) -> None:
    one = write(make_receipt(kind="grid"), tmp_path)
    other = write(make_receipt(kind="grid-cell"), tmp_path)
    assert list(read_folder(tmp_path)) == sorted([one, other])
    assert list(read_folder(tmp_path, "grid")) == [one]
    assert read_folder(tmp_path / "absent") == {}


def test_a_receipt_keeps_some_of_many_samples_in_order() -> None:
    kept = thinned([float(value) for value in range(1200)])
    assert len(kept) == 400
    assert kept[:3] == [0.0, 3.0, 6.0]
    assert thinned([1 / 3, 123456789.0]) == [0.333333, 123457000.0]


def test_lists_of_numbers_take_one_line_and_texts_stay_as_they_are(tmp_path: Path) -> None:
    receipt = make_receipt(
        samples={"run_s": [1.0, -2.5e-7], "none_s": []}, command=["quire", "[\n 1,\n 2]"]
    )
    path = write(receipt, tmp_path)
    assert '"run_s": [1.0, -2.5e-07]' in path.read_text()
    assert as_data(read(path)) == as_data(receipt)


def test_the_time_now_is_a_time_of_a_receipt() -> None:
    validate(SOUND | {"created": now()})


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("kind",), "A b", "field 'kind'"),
        (("kind",), None, "field 'kind' must be string, got None"),
        (("created",), "yesterday", "field 'created'"),
        (("command",), [], "field 'command' must have at least 1"),
        (("command",), ["quire", 5], r"field 'command\[1\]' must be string, got 5"),
        (("seed",), 1.5, "field 'seed' must be integer, got 1.5"),
        (("seed",), True, "field 'seed' must be integer, got True"),
        (("schema",), 2, "field 'schema' must be 1, got 2"),
        (("model", "sha256"), "abc", "field 'model.sha256'"),
        (("machine", "cores"), "two", "field 'machine.cores' must be number"),
        (("executed", "fallback"), 0, "field 'executed.fallback' must be string or null"),
        (("samples", "seconds"), [1.0, None], r"field 'samples.seconds\[1\]' must be number"),
        (("samples", "seconds"), [float("nan")], r"field 'samples.seconds\[0\]' must be number"),
        (("results", "words"), "fast", "field 'results.words' must be number or object or null"),
        (("extra",), 1, "field 'extra' is no field of a receipt"),
    ],
)
def test_what_is_wrong_is_named(place: tuple[str, ...], value: Any, complaint: str) -> None:
    data = deepcopy(SOUND)
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(ReceiptError, match=complaint):
        validate(data)


@pytest.mark.parametrize("name", schema()["required"])
def test_every_field_must_be_there(name: str) -> None:
    data = {key: value for key, value in SOUND.items() if key != name}
    with pytest.raises(ReceiptError, match=f"field '{name}' is missing"):
        validate(data)


def test_nothing_broken_is_written(tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match=r"samples\.seconds"):
        write(make_receipt(samples={"seconds": [float("inf")]}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ReceiptError, match=r"cannot write .*: No space left on device"):
        write(make_receipt(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "no JSON"), ("NaN", "no JSON"), ("[]", "must be object"), ("[" * 10**5, "no JSON")],
)
def test_a_file_that_is_no_receipt_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ReceiptError, match=rf"broken\.json.*{complaint}"):
        read(path)


def test_a_missing_file_and_a_folder_that_is_a_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match="cannot read"):
        read(tmp_path / "absent.json")
    (tmp_path / "file").touch()
    with pytest.raises(ReceiptError, match="cannot write"):
        write(make_receipt(), tmp_path / "file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)  # fmt: skip


@given(st.sampled_from(sorted(SOUND)), json_values, st.data())
def test_our_verdict_is_that_of_a_full_implementation(
    name: str, value: Any, data: st.DataObject
) -> None:
    changed = deepcopy(SOUND)
    inner = changed
    if isinstance(changed[name], dict) and data.draw(st.booleans()):
        inner = changed[name]
        name = data.draw(st.sampled_from([*sorted(inner), "new"]))
    inner[name] = value
    try:
        validate(changed)
        is_valid = True
    except ReceiptError:
        is_valid = False
    assert is_valid == is_valid_to_jsonschema(changed)


@pytest.mark.parametrize(
    ("asked", "ran", "fallback", "told"),
    [
        ("auto", "reference", None, None),
        ("cpu", "cpu", None, None),
        (None, None, None, None),
        ("cpu", "reference", None, "device 'cpu' was asked for, but 'reference' ran"),
        ("cpu", "cpu", "no kernel for Q3_K", "no kernel for Q3_K"),
    ],
)
def test_a_run_that_left_its_path_is_told(
    asked: str | None, ran: str | None, fallback: str | None, told: str | None
) -> None:
    executed: dict[str, Any] = {"device": ran, "kernels": [], "fallback": fallback}
    assert deviation(make_receipt(asked={"device": asked}, executed=executed)) == told
