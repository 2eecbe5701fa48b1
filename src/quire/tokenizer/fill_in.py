"""Fill-in-the-middle: the control tokens between which code models were trained to write what
stands between two texts, known by their names in the vocabulary as llama.cpp knows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

# Before the text before, before the text after, before what is to be filled in. None: the text
# after comes first, and the text before is continued.
_FORMS: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5 Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral, Devstral
)
_END_NAMES = ("▁<EOT>", "<|file_separator|>", *sum(MIDDLE_END_NAMES.values(), ()))


@dataclass(frozen=True, slots=True)
class FillIn:
    """The tokens of a vocabulary that mark the parts."""

    before: int
    after: int
    middle: int | None  # None: as in _FORMS
    ends: tuple[int, ...]  # each of them ends what is filled in, beside the model's own ends

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """What the model continues with the tokens between two texts."""
        if self.middle is None:
            return [self.after, *after, self.before, *before]
        return [self.before, *before, self.after, *after, self.middle]


def find_fill_in(
    ids: Mapping[str, int], named: Sequence[int | None] = (None, None, None)
) -> FillIn | None:
    """The form of a vocabulary: that of the ids which its file names, else the first of the known
    ones; None where it has none."""
    before, after, middle = named
    if before is not None and after is not None and middle is not None:
        return _fill_in(ids, before, after, middle)
    for first, second, third in _FORMS:
        if first in ids and second in ids and (third is None or third in ids):
            return _fill_in(ids, ids[first], ids[second], None if third is None else ids[third])
    return None


def _fill_in(ids: Mapping[str, int], before: int, after: int, middle: int | None) -> FillIn:
    ends = {ids[name] for name in _END_NAMES if name in ids} | {before, after}
    if middle is not None:
        ends.add(middle)
    return FillIn(before, after, middle, tuple(sorted(ends)))
