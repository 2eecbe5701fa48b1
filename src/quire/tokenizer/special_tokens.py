"""Which tokens are special: their ids, and which of them end a generation.

Files name few of their end tokens, so the rest are known by their text, as llama.cpp knows them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

END_NAMES = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|tool_response>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<｜end▁of▁sentence｜>",
    }
)

# Fill-in-the-middle tokens after which nothing more of this text follows, by the field naming them.
MIDDLE_END_NAMES: Mapping[str, tuple[str, ...]] = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": (
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
    ),
    "fim_sep_token_id": ("<|file_sep|>",),
}

# A token of one of these names is a control token even where the file forgot to say so.
CONTROL_NAMES = END_NAMES.union(*MIDDLE_END_NAMES.values())

# Where all of the first are end tokens, the second is a mere separator.
_NOT_AN_END = (
    (frozenset({"<|return|>", "<|call|>"}), "<|end|>"),
    (frozenset({"<|calls|>", "<|flush|>"}), "<|end|>"),
    (frozenset({"<|tool_response>"}), "</s>"),
)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that mean something to the engine; None where the vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    padding: int | None = None
    ends: tuple[int, ...] = ()  # each of them ends a generation


def end_token_ids(named: Iterable[int | None], candidates: Mapping[str, int]) -> tuple[int, ...]:
    """The ids that end a generation: those a file names, and those known by their text."""
    found = {text: token for text, token in candidates.items() if text in END_NAMES}
    for required, separator in _NOT_AN_END:
        if required <= found.keys():
            found.pop(separator, None)
    return tuple(sorted({token for token in named if token is not None}.union(found.values())))
