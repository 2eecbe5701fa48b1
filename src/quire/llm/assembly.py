"""From a model's name or path to everything that runs it: tokenizer, executor, engine."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.errors import ConfigError, ModelFileError
from quire.engine.engine import Engine
from quire.executors.base import Executor
from quire.llm.devices import DEVICES, Options, resolve_auto
from quire.llm.machine import MemoryPlan
from quire.loader.defaults import resolve
from quire.loader.reading import read_capped
from quire.model.isolated import examine
from quire.model.loading import Model, end_token_ids, load_model, read_tokenizer
from quire.model.spec import ModelSpec
from quire.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded model, ready for engines: one at a time, because they share the executor's cache.

    `options.device` names the device that runs it, also where "auto" was asked for.
    """

    spec: ModelSpec
    tokenizer: Tokenizer | None
    executor: Executor
    options: Options
    memory: MemoryPlan
    end_token_ids: tuple[int, ...]

    def with_batch_size(self, max_batch_size: int) -> "Assembly":
        """The same for batches of another size, which must have blocks enough."""
        options = replace(self.options, max_batch_size=max_batch_size)
        options.engine_config()
        self.memory.check_batch(self.executor.capacity.num_blocks, max_batch_size)
        return replace(self, options=options)

    def new_engine(self) -> Engine:
        """An engine with an empty cache; the weights are not touched."""
        config = self.options.engine_config()
        return Engine(
            self.executor,
            config,
            end_token_ids=self.end_token_ids,
            make_detokenizer=None if self.tokenizer is None else self.tokenizer.detokenizer,
        )


def assemble(model: str | Path, options: Options) -> Assembly:
    """Load a model by name or path; what is wrong with the options is said before that."""
    if not isinstance(model, str | Path):
        raise ConfigError(f"model must be a name or a path, got {model!r:.100}")
    options.engine_config()
    template = read_template(options.chat_template)
    path = resolve(model, print_notice)
    examine(model, path, trusted=options.trust_model_file).check()
    with load_model(path, i2s_packing=options.i2s_packing) as loaded:
        loaded = _with_context(loaded, options.max_context)
        tokenizer = _with_template(read_tokenizer(loaded), template, options.chat_template)
        options = resolve_auto(options, loaded, print_notice)
        executor, memory = DEVICES[options.device].load(loaded, options)
        return Assembly(
            spec=loaded.spec,
            tokenizer=tokenizer,
            executor=executor,
            options=options,
            memory=memory,
            end_token_ids=end_token_ids(loaded, tokenizer),
        )


def read_template(chosen: str | Path | bool) -> str | None:
    """The text of a chat template that the user gives; None where it is not a file's."""
    if isinstance(chosen, bool):
        return None
    try:
        return read_capped(Path(chosen), MAX_TEMPLATE_BYTES).decode()
    except (ModelFileError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {error}") from error


def _with_template(
    tokenizer: Tokenizer | None, text: str | None, chosen: str | Path | bool
) -> Tokenizer | None:
    """The tokenizer with the template that was chosen instead of its own."""
    if tokenizer is not None and chosen is not True:
        return tokenizer.with_chat_template(text)
    if text is not None:
        raise ConfigError(
            "chat_template names a file, but the model has no tokenizer: leave it out"
        )
    return tokenizer


def _with_context(model: Model, max_context: int | None) -> Model:
    """The same model with a shorter context."""
    if max_context is None:
        return model
    longest = model.spec.context_length
    if max_context > longest:
        raise ConfigError(
            f"max_context is {max_context}, but the model was made for {longest} tokens"
        )
    return replace(model, spec=replace(model.spec, context_length=max_context))


def print_notice(line: str) -> None:
    """Print a line on standard error where that is a terminal."""
    if sys.stderr.isatty():
        print(f"quire: {line}", file=sys.stderr, flush=True)
