"""Receipts come back as they were written, and broken ones are refused by the field's name."""

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.sound_receipt import is_valid_to_jsonschema, make_receipt

from quire_bench.receipts import (
    Receipt,
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

SOUND: dict[str, Any] = as_data(make_receipt())


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
        (("kind",), "A b", r"field \$.kind: 'A b' does not match"),
        (("kind",), None, r"field \$.kind: None is not of type 'string'"),
        (("created",), "yesterday", r"field \$.created: 'yesterday' does not match"),
        (("command",), [], r"field \$.command: "),
        (("command",), ["quire", 5], r"field \$.command\[1\]: 5 is not of type 'string'"),
        (("seed",), 1.5, r"field \$.seed: 1.5 is not of type 'integer'"),
        (("seed",), True, r"field \$.seed: True is not of type 'integer'"),
        (("schema",), 2, r"field \$.schema: 2 is not one of \[1\]"),
        (("model", "sha256"), "abc", r"field \$.model.sha256: "),
        (("machine", "cores"), "two", r"field \$.machine.cores: 'two' is not of type 'number'"),
        (("executed", "fallback"), 0, r"field \$.executed.fallback: 0 is not of type"),
        (("samples", "seconds"), [1.0, None], r"field \$.samples.seconds\[1\]: None is not of"),
        (("samples", "seconds"), [float("nan")], r"field \$.samples.seconds\[0\]: nan is not of"),
        (("results", "words"), "fast", r"field \$.results.words: 'fast' is not of type 'number'"),
        (("extra",), 1, r"'extra' was unexpected"),
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
    with pytest.raises(ReceiptError, match=f"'{name}' is a required property"):
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
    [
        ("{", "no JSON"),
        ("NaN", "no JSON"),
        ("[]", "is not of type 'object'"),
        ("[" * 10**5, "no JSON"),
    ],
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


@given(st.sampled_from(sorted(set(SOUND) - {"schema"})), json_values, st.data())
def test_what_is_written_can_be_read_again(name: str, value: Any, data: st.DataObject) -> None:
    fields = deepcopy({key: kept for key, kept in SOUND.items() if key != "schema"})
    inner = fields
    if isinstance(fields[name], dict) and data.draw(st.booleans()):
        inner = fields[name]
        name = data.draw(st.sampled_from([*sorted(inner), "new"]))
    inner[name] = value
    with TemporaryDirectory() as folder:
        try:
            path = write(Receipt(**fields), folder)
        except ReceiptError:
            return
        assert as_data(read(path)) == {"schema": 1, **fields}


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


def test_the_tree_keeps_one_receipt_of_each_configuration() -> None:
    kept = Path(__file__).parents[2] / "receipts"
    found: Counter[str] = Counter()
    for folder in (kept, *(path for path in kept.iterdir() if path.is_dir())):
        for receipt in read_folder(folder).values():
            server = receipt.executed.get("server")
            what = [receipt.kind, receipt.model, receipt.command, receipt.settings, server]
            found[json.dumps([folder.name, *what])] += 1
    assert found and max(found.values()) == 1
