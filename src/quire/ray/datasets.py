"""generate: completions for a Ray Dataset's prompts, by engines in Ray actors.

With a checkpoint folder every finished batch is a file there, put in place whole. A batch that is
run again, because its actor died or the program was started anew, finds its file; its rows' tokens
would be the same anyway, because each row's seed is a function of its id.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import ray
from ray.data import ActorPoolStrategy, Dataset

from quire.core.errors import ConfigError
from quire.core.request import RequestOutput
from quire.core.sampling import SamplingOptions
from quire.llm import LLM
from quire.llm.prompts import one_params

_COLUMNS = {
    "completion": pa.string(),
    "finish_reason": pa.string(),
    "num_tokens": pa.int64(),
    "error": pa.string(),  # null where the row was completed
}
_PART = "part-*.parquet"
_SETTINGS = "generate.json"


class _Job(NamedTuple):
    """What an actor needs to know."""

    model: str
    engine: Mapping[str, Any]  # as LLM takes it
    sampling: SamplingOptions
    prompt_column: str
    id_column: str
    is_chat: bool
    folder: str | None


def generate(
    dataset: Dataset,
    *,
    model: str | Path,
    checkpoint: str | Path | None = None,
    prompt_column: str = "prompt",
    id_column: str = "id",
    chat: bool = False,
    engine: Mapping[str, Any] | None = None,
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    batch_size: int = 256,
    **sampling: Unpack[SamplingOptions],
) -> Dataset:
    """The dataset with the columns completion, finish_reason, num_tokens and error added.

    Lazy, as all of Ray Data: work begins when the result is read, and stops where it is not read
    on. `concurrency`: actors, or the fewest and most of them; each loads `model` with the options
    of LLM in `engine` and batches its rows. `sampling`: fields of SamplingParams. `chat`: prompts
    are messages of a user. A row that cannot be run has its `error`, and the others go on.

    `id_column` names each row for ever: a row without a seed gets one made of its id. With
    `checkpoint`, a folder that all nodes share, a row that is finished there is not run again.
    """
    one_params(None, None, sampling, {})  # what is wrong is said here
    _check_columns(dataset, prompt_column, id_column)
    folder = None if checkpoint is None else Path(checkpoint).absolute()
    job = _Job(
        str(model), dict(engine or {}), sampling, prompt_column, id_column, chat,
        None if folder is None else str(folder),
    )  # fmt: skip
    done: Dataset | None = None
    if folder is not None:
        parts = _open(folder, job)
        if parts:
            done = ray.data.read_parquet([str(part) for part in parts])
            dataset = _without(dataset, parts, id_column)
    made = dataset.map_batches(
        _Generator,
        fn_constructor_args=[job],
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=_pool(concurrency),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )
    return made if done is None else made.union(done)


def _pool(concurrency: int | tuple[int, int]) -> ActorPoolStrategy:
    if isinstance(concurrency, int):
        return ActorPoolStrategy(size=concurrency)
    least, most = concurrency
    return ActorPoolStrategy(min_size=least, max_size=most)


def _check_columns(dataset: Dataset, *names: str) -> None:
    schema = dataset.schema()
    known = [] if schema is None else list(schema.names)  # None: no rows
    for name in names:
        if schema is not None and name not in known:
            raise ConfigError(
                f"the dataset has no column {name!r}, but {', '.join(known)}: name the prompts' "
                "with prompt_column, and with id_column one that tells rows apart"
            )
    taken = [name for name in _COLUMNS if name in known]
    if taken:
        raise ConfigError(f"the dataset has a column {taken[0]!r} already: rename it")


# ---- the checkpoint


def _open(folder: Path, job: _Job) -> list[Path]:
    """The parts in a folder, which is made; refused where they are another job's."""
    settings = {**job._asdict(), "folder": None}
    text = json.dumps(settings, sort_keys=True, default=str)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _SETTINGS
        if not file.exists():
            _put_in_place(file, lambda path: path.write_text(text))
        kept = file.read_text()
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror or error}") from error
    if kept != text:
        raise ConfigError(
            f"{folder} holds the results of another model or other parameters: name another "
            f"folder; {file} says which"
        )
    return sorted(folder.glob(_PART))


def _put_in_place(file: Path, write: Any) -> None:
    """Whole or not at all, whoever else does the same."""
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        write(draft)
        with draft.open("rb") as opened:
            os.fsync(opened.fileno())
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _without(dataset: Dataset, parts: Sequence[Path], id_column: str) -> Dataset:
    """The rows that are in no part."""
    ids = pa.concat_arrays(
        chunk
        for part in parts
        for chunk in pq.read_table(part, columns=[id_column])[id_column].chunks
    )
    kept = ray.put(ids)

    def missing(table: pa.Table) -> pa.Table:
        found = pc.is_in(table[id_column], value_set=ray.get(kept))
        return table.filter(pc.invert(found))

    return dataset.map_batches(missing, batch_format="pyarrow", zero_copy_batch=True)


# ---- in an actor


class _Generator:
    """A model, loaded once; called with one batch after another."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._llm = LLM(job.model, **job.engine)

    def __call__(self, table: pa.Table) -> pa.Table:
        if not table.num_rows:
            return _with_columns(table, [])
        ids = table[self._job.id_column].to_pylist()
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise ConfigError(f"two rows have the id {twice!r}: ids must tell rows apart")
        part = self._part_of(ids)
        if part is not None and part.exists():
            return pq.read_table(part)
        made = _with_columns(table, self._complete(table, ids))
        if part is not None:
            _put_in_place(part, lambda path: pq.write_table(made, path))
        return made

    def _complete(self, table: pa.Table, ids: Sequence[object]) -> list[RequestOutput]:
        job = self._job
        prompts = table[job.prompt_column].to_pylist()
        params = one_params(None, None, job.sampling, self._llm.sampling_defaults)
        each = [params if params.seed is not None else replace(params, seed=_seed(i)) for i in ids]
        run = self._llm.chat if job.is_chat else self._llm.generate
        return [*run(prompts, each, on_error="keep", progress=False)]

    def _part_of(self, ids: Sequence[object]) -> Path | None:
        """By its rows: the same batch has the same file, in whatever actor it is run."""
        if self._job.folder is None:
            return None
        digest = hashlib.blake2b(json.dumps(ids, default=str).encode(), digest_size=16)
        return Path(self._job.folder) / _PART.replace("*", digest.hexdigest())


def _seed(row_id: object) -> int:
    digest = hashlib.blake2b(repr(row_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _with_columns(table: pa.Table, outputs: Sequence[RequestOutput]) -> pa.Table:
    found = {
        "completion": [None if one.error is not None else one.text for one in outputs],
        "finish_reason": [one.finish_reason for one in outputs],
        "num_tokens": [sum(part.num_tokens for part in one.completions) for one in outputs],
        "error": [None if one.error is None else str(one.error) for one in outputs],
    }
    for name, kind in _COLUMNS.items():
        table = table.append_column(name, pa.array(found[name], kind))
    return table
