"""Reranker: causal models that judge whether a document answers a query by "yes" or "no".

Qwen3-Reranker's files are those of any Qwen3; nothing in them but their name says what they were
trained for. So a model is a reranker if its name (the file's `general.name` or `general.basename`,
or the name of the file or folder) has the word "reranker" in it, and its vocabulary has "yes", "no"
and ChatML's control tokens. The prompt is the one that Qwen publishes.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.core.plan import TokenLogprob
from quire.core.sampling import MAX_LOGPROBS, SamplingParams
from quire.llm.prompts import Prepared
from quire.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Reranker:
    """Prompts of pairs, and what the next token says of them."""

    tokenizer: Tokenizer
    yes: int
    no: int

    def prompt(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        max_document_tokens: int | None = None,
        limit: int | None = None,
    ) -> Prepared:
        """Of a document longer than `max_document_tokens` its beginning; more than `limit` tokens
        in all are a RequestError. Control tokens in the texts are letters."""
        document = self._beginning(document, max_document_tokens)
        pair = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        end = len(_BEFORE) + len(pair)
        spans = [(0, len(_BEFORE)), (end, end + len(_AFTER))]
        tokens = self.tokenizer.encode(
            f"{_BEFORE}{pair}{_AFTER}", add_special=False, parse_special=spans, limit=limit
        )
        return Prepared(tokens)

    def _beginning(self, text: str, num_tokens: int | None) -> str:
        if num_tokens is None:
            return text
        tokens = self.tokenizer.encode(text, add_special=False, parse_special=False)
        return text if len(tokens) <= num_tokens else self.tokenizer.decode(tokens[:num_tokens])

    @property
    def params(self) -> SamplingParams:
        """The likelier of the two answers comes, with the log-probabilities of the likeliest."""
        return self._asking(self.yes, self.no)

    def params_for_other(self, scored: TokenLogprob) -> SamplingParams | None:
        """To have the log-probability of the other answer, where it is not among the likeliest."""
        found = {token for token, _ in scored.top} | {scored.token}
        missing = [token for token in (self.yes, self.no) if token not in found]
        return self._asking(*missing) if missing else None

    def _asking(self, *tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, allowed_token_ids=tokens
        )

    def relevance(self, scores: Sequence[TokenLogprob]) -> float:
        """The probability of yes among the two, from scores that have both."""
        found = dict(pair for score in scores for pair in score.top)
        found |= {score.token: score.logprob for score in scores}
        return 1.0 / (1.0 + math.exp(min(700.0, found[self.no] - found[self.yes])))


def find_reranker(names: Iterable[str], tokenizer: Tokenizer | None) -> Reranker | None:
    """None for a model that is no reranker; see above."""
    if tokenizer is None or not any(re.search("reranker", name, re.IGNORECASE) for name in names):
        return None
    yes, no, start, end = map(tokenizer.token_id, ("yes", "no", "<|im_start|>", "<|im_end|>"))
    if yes is None or no is None or start is None or end is None:
        return None
    return Reranker(tokenizer, yes, no)
