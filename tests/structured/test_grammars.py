"""Grammars over every kind of vocabulary: whatever tokens the masks let through, the text fits."""

import gc
import json
import re
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from tests.structured.walks import grammars_of, mask_of, tokens_in, walk
from tests.tokenizer.references import merge_by_score
from tests.tokenizer.vocabularies import (
    built,
    byte_level_metadata,
    learnt_merges,
    sentencepiece_metadata,
    sentencepiece_scores,
    smollm2,
    to_letters,
)

from quire.core.errors import OverloadedError, RequestError
from quire.core.sampling import Constraint, SamplingParams
from quire.structured import Grammars, compiled, grammars
from quire.structured.compiled import CompiledGrammar
from quire.structured.vocabulary import Vocabulary
from quire.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "büro"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "required": ["a"], "additionalProperties": False}
JSON_LETTERS = '{}":,[] nametgsrulfi0123456789'


def byte_level() -> Tokenizer:
    texts = [to_letters(json.dumps({"name": "tags", "age": 12, "x": ["true", "false"]}))]
    return built(byte_level_metadata(learnt_merges(texts, 40), "gpt-2"))


def sentencepiece() -> Tokenizer:
    return built(sentencepiece_metadata(sentencepiece_scores(JSON_LETTERS, 3, 150), eos_token_id=2))


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": smollm2,
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_whatever_is_allowed_fits_the_schema(name: str) -> None:
    tokenizer = VOCABULARIES[name]()
    made = grammars_of(tokenizer, padding=5)
    for seed in range(10):
        found = walk(made, Constraint.json(PERSON), tokenizer.end_token_ids, seed)
        assert found.is_complete
        person = json.loads(tokenizer.decode(found.tokens, continuation=True))
        assert set(person) <= {"name", "age", "tags"}
        assert len(person["name"]) <= 8
        assert 0 <= person["age"] <= 130
        assert set(person.get("tags", [])) <= {"a", "büro"}


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint.regex(r"\d{3}-[a-f]{2}"), r"[0-9]{3}-[a-f]{2}"),
        (Constraint.regex(r"^(/|é)+\.x$"), r"(/|é)+\.x"),
        (Constraint.choice(["yes", "no", 'a "quote" \\ ü\n']), r'yes|no|a "quote" \\ ü\n'),
        (Constraint.grammar('root ::= item+\nitem ::= "<" [a-c]+ ">"'), r"(<[a-c]+>)+"),
        (Constraint.grammar('start: "(" start? ")"'), r"\(+\)+"),
    ],
)
def test_patterns_choices_and_grammars_hold(
    name: str, constraint: Constraint, pattern: str
) -> None:
    tokenizer = VOCABULARIES[name]()
    made = grammars_of(tokenizer)
    for seed in range(5):
        found = walk(made, constraint, tokenizer.end_token_ids, seed, max_tokens=2000)
        text = tokenizer.decode(found.tokens, continuation=True)
        assert found.is_complete
        assert re.fullmatch(pattern, text), text


def test_a_format_that_nobody_knows_says_nothing() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "path", "maxLength": 2},
            "b": {"type": "string", "format": "topic", "maxLength": 2},
            "c": {"const": {"format": "path"}},
            "d": {"type": "string", "format": "date"},
        },
        "required": ["a", "b", "c", "d"],
        "additionalProperties": False,
    }
    tokenizer = byte_level()
    found = walk(grammars_of(tokenizer), Constraint.json(schema), tokenizer.end_token_ids)
    value = json.loads(tokenizer.decode(found.tokens))
    assert value["c"] == {"format": "path"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", value["d"])


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cat(Closed):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(Closed):
    kind: Literal["dog"]
    is_loud: bool


class Owner(Closed):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list["Owner"] = Field(max_length=1)


def test_pydantics_unions_and_recursion_are_followed() -> None:
    tokenizer = byte_level()
    made = grammars_of(tokenizer)
    for seed in range(5):
        found = walk(made, Constraint.json(Owner), tokenizer.end_token_ids, seed, 3000)
        assert found.is_complete
        Owner.model_validate_json(tokenizer.decode(found.tokens))


@pytest.mark.parametrize("text", ["bcdaadbda", "cbcddd", "dbdcbcd", "a", "ab cd"])
def test_forced_text_has_the_tokens_of_text_in_the_middle(text: str) -> None:
    """SentencePiece would put a space before it."""
    scores = sentencepiece_scores("abcdé", 5, 60)
    tokenizer = built(sentencepiece_metadata(scores, eos_token_id=2))
    vocabulary = Vocabulary(tokenizer, tokenizer.vocabulary_size, (2,))
    pieces = merge_by_score(text.replace(" ", "▁"), scores)
    assert [tokenizer.token_name(token) for token in vocabulary(text.encode())] == pieces


def test_forced_bytes_that_are_no_text_have_tokens() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocabulary_size, (2,))
    assert b"".join(map(tokenizer.token_bytes, vocabulary(b"a\xc3"))) == b"a\xc3"


def test_control_tokens_and_padding_are_never_text() -> None:
    tokenizer = smollm2()
    made = grammars_of(tokenizer, padding=64)
    mask = mask_of(made, made(SamplingParams(structured=Constraint.regex("(.|\n)*"))))
    allowed = set(tokens_in(mask))
    assert not (tokenizer.hidden_token_ids - set(tokenizer.end_token_ids)) & allowed
    assert set(tokenizer.end_token_ids) <= allowed
    assert max(allowed) < tokenizer.vocabulary_size


def test_a_model_without_end_tokens_ends_where_nothing_may_follow() -> None:
    tokenizer = byte_level()
    made = Grammars(tokenizer, tokenizer.vocabulary_size, ())
    found = walk(made, Constraint.choice(["abc"]), ())
    assert found.is_complete
    assert tokenizer.decode(found.tokens) == "abc"


def test_tokens_of_a_grammar_are_the_models() -> None:
    """Its process checks grammars over the tokens of bytes alone."""
    tokenizer = smollm2()
    made = grammars_of(tokenizer)
    for tokens, allowed in (("700", [700]), ("9,700-702", [9, 700, 701, 702])):
        grammar = made(SamplingParams(structured=Constraint.grammar(f"start: <[{tokens}]> /a+/")))
        assert tokens_in(mask_of(made, grammar)) == allowed
    outside = tokenizer.vocabulary_size
    with pytest.raises(RequestError, match=f"{outside}"):
        made(SamplingParams(structured=Constraint.grammar(f"start: <[{outside}]>")))


# ---- the end


def masks_along(params: SamplingParams, text: str) -> list[set[int]]:
    """The masks after each character of a text, over the vocabulary of bytes."""
    tokenizer = byte_level()
    made = grammars_of(tokenizer)
    grammar = made(params)
    masks = [set(tokens_in(mask_of(made, grammar)))]
    for letter in text:
        [token] = tokenizer.encode(letter, add_special=False)
        grammar.accept(token)
        masks.append(set(tokens_in(mask_of(made, grammar))))
    return masks


def test_the_end_is_allowed_where_the_text_may_end() -> None:
    ends = set(byte_level().end_token_ids)
    none, one, two = masks_along(SamplingParams(structured=Constraint.regex("ab*")), "ab")
    assert not none & ends
    assert one & ends == two & ends == ends


def test_stop_tokens_of_the_request_are_allowed_where_the_text_may_end() -> None:
    params = SamplingParams(structured=Constraint.regex("ab*"), stop_token_ids=(77,))
    none, one = masks_along(params, "a")
    assert 77 not in none
    assert 77 in one


def test_with_ignore_eos_the_text_goes_on_as_long_as_it_can() -> None:
    ends = set(byte_level().end_token_ids)
    params = SamplingParams(structured=Constraint.regex("ab{0,2}"), ignore_eos=True)
    _, one, two = masks_along(params, "ab")
    assert one and two and not (one | two) & ends


# ---- what cannot be followed


@pytest.mark.parametrize(
    ("constraint", "part"),
    [
        (
            Constraint.json({"properties": {"b": {"items": {"not": {"const": 1}}}}}),
            "at #/properties/b/items: ",
        ),
        (Constraint.json({"$ref": "#/$defs/x", "$defs": {"x": {"type": "objekt"}}}), "objekt"),
        (Constraint.json({"$ref": "https://localhost/x"}), "localhost"),
        (Constraint.json({"anyOf": [{"type": "null"}, {"oneOf": [{}, {}]}]}), "at #/anyOf/1: "),
        (Constraint.json({"$ref": "#"}), "nothing can match it"),
        (Constraint.regex("(a"), "unclosed group"),
        (Constraint.regex("(?=a)b"), "look-around"),
        (Constraint.regex(r"(a)\1"), "backreferences"),
        (Constraint.regex("a\\"), "escapes nothing"),
        (Constraint.regex("a{1000000}"), "regex: it is too large: lexer error"),
        (Constraint.grammar("root ::= foo"), "foo"),
        (Constraint.grammar("start: foo"), "unknown name"),
        (Constraint("choice", "x"), "choice"),
    ],
)
def test_an_error_says_what_is_wrong_and_where(constraint: Constraint, part: str) -> None:
    made = grammars_of(byte_level())
    with pytest.raises(RequestError) as caught:
        made.prepare(SamplingParams(structured=constraint))
    assert part in str(caught.value)
    assert caught.value.param == "structured"


@pytest.mark.parametrize(
    ("constraint", "text", "reason"),
    [
        (
            Constraint.regex("b|xa{1000000}"),
            "xa",
            "lexer error: too many expressions constructed",
        ),
        (
            Constraint.json({"patternProperties": {"^a$": {"const": 1}}, **CLOSED}),
            '{"a":1, "',
            "nothing may follow, and the text may not end",
        ),
    ],
)
def test_where_a_grammar_fails_later_the_reason_is_in_words(
    constraint: Constraint, text: str, reason: str
) -> None:
    tokenizer = byte_level()
    made = grammars_of(tokenizer)
    grammar = made(SamplingParams(structured=constraint))
    with pytest.raises(ValueError, match=f"^{reason}$"):
        for letter in text:
            mask = mask_of(made, grammar)
            if grammar.failure is not None:
                assert not tokens_in(mask)
                raise ValueError(grammar.failure)
            grammar.accept(*tokenizer.encode(letter, add_special=False))


def chain(count: int, rule: str) -> str:
    rules = [rule.format(n, n + 1) for n in range(count)]
    return "\n".join([f"start: {rule[0]}0", *rules, f'{rule[0]}{count}: "y"'])


def referring(count: int, **more: Any) -> Constraint:
    defs: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **more} for n in range(count)}
    return Constraint.json({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {}}})


HOSTILE = {
    "rules 5000 deep": Constraint.grammar(chain(5000, 'a{}: a{} "x"')),
    "terminals 7000 deep": Constraint.grammar(chain(7000, 'A{}: A{} "x"')),
    "optional 8000 deep": Constraint.grammar(chain(8000, "a{}: a{}?")),
    "references 3500 deep": referring(3500),
    "nested": Constraint.grammar("start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "nested GBNF": Constraint.grammar("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "nested pattern": Constraint.regex("(" * 60_000 + "a" + ")" * 60_000),
    "huge enum": Constraint.json({"enum": [f"v{n}" for n in range(12_000)]}),
    "properties": Constraint.json({"properties": {f"p{n}": {} for n in range(10_000)}}),
    "alternatives": Constraint.grammar("start: " + " | ".join(f'"{n}"' for n in range(9000))),
    "repetitions": Constraint.regex("((a{1,1000}){1,1000}){1,1000}"),
    "long text": Constraint.choice(["ab" * 60_000]),
    "many patterns": Constraint.regex("|".join(f".*{n}.{{{n % 50}}}" for n in range(3000))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_or_followed_and_harms_nobody(name: str) -> None:
    """Some overflow the stack, or take half a minute, where nothing keeps them from it."""
    tokenizer = byte_level()
    made = grammars_of(tokenizer)
    params = SamplingParams(structured=HOSTILE[name])
    try:
        grammar = made(params)
        for _ in range(3):
            mask = mask_of(made, grammar)
            found = set(tokens_in(mask)) - set(tokenizer.end_token_ids)
            if not found:
                break
            grammar.accept(min(found))
    except RequestError as error:
        assert len(str(error)) <= 2000
    except ValueError:
        pass  # a limit was met by the text
    found_after = walk(made, Constraint.choice(["a"]), tokenizer.end_token_ids)
    assert tokenizer.decode(found_after.tokens) == "a"


# ---- the cache


def test_constraints_are_compiled_once_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Constraint] = []
    compile_here = Grammars._compile

    def counted(self: Grammars, constraint: Constraint) -> CompiledGrammar | RequestError:
        compiled.append(constraint)
        return compile_here(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", counted)
    made = grammars_of(byte_level())
    for text in ("a+", "b+", "a+"):
        made.prepare(SamplingParams(structured=Constraint.regex(text)))
    for _ in range(2):
        with pytest.raises(RequestError):
            made.prepare(SamplingParams(structured=Constraint.regex("(")))
    assert [constraint.value for constraint in compiled] == ["a+", "b+", "("]


def test_the_cache_is_bounded_and_keeps_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    made = grammars_of(byte_level())
    params = [SamplingParams(structured=Constraint.regex(f"a{{{n}}}")) for n in range(1, 6)]
    kept = made.prepare(params[0])
    for other in params[1:]:
        made.prepare(other)
    gc.collect()
    assert kept is not None and made.check(params[0]) is kept.compiled
    assert len(made._recent) <= 2
    assert len(made._in_use) <= 3
    dropped = made.check(params[1])
    assert dropped is not None and dropped.constraint == params[1].structured


def test_the_cache_holds_so_much_text_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED_CHARACTERS", 100)
    made = grammars_of(byte_level())
    texts = ["a" * 60, "b" * 40, "b" * 30, "c" * 120, "d"]
    recent = []
    for text in texts:
        made.prepare(SamplingParams(structured=Constraint.regex(text)))
        recent.append([constraint.value for constraint in made._recent])
    assert recent == [texts[:1], texts[:2], texts[1:3], texts[3:4], texts[4:]]


WORDS = {"type": "string", "maxLength": 500, "pattern": r"^(?:\S+\s+){0,99}\S+$"}  # many states
MANY_WORDS = json.dumps(" ".join(["word"] * 60)).encode()


def given_again(grammar: grammars.MatcherGrammar, tokenizer: Tokenizer) -> None:
    for token in tokenizer.encode(MANY_WORDS.decode()):
        grammar.accept(token)


def test_a_text_that_overruns_the_limits_ends_no_other() -> None:
    tokenizer = smollm2()
    made = grammars_of(tokenizer)
    params = SamplingParams(structured=Constraint.json(WORDS))
    kept = made.prepare(params)
    tokens = tokenizer.encode(MANY_WORDS.decode())
    first, other = made(params), made(params)
    assert not first._matcher.consume_tokens(tokens)
    for grammar in (other, made(params)):
        given_again(grammar, tokenizer)
        assert grammar._matcher.is_accepting()
    assert kept is not None and not kept.matchers


def test_tokens_that_are_given_again_overrun_no_limit() -> None:
    """After a crash: no step asks for a mask between them."""
    tokenizer = smollm2()
    made = grammars_of(tokenizer)
    grammar = made(SamplingParams(structured=Constraint.json(WORDS)))
    given_again(grammar, tokenizer)
    assert grammar._matcher.is_accepting()


def test_matchers_are_made_where_the_grammar_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    made = grammars_of(tokenizer)
    params = SamplingParams(structured=Constraint.regex("a+"), n=3)
    counted = []

    def some_of(self: CompiledGrammar, count: int) -> list[Any]:
        counted.append(count)
        return make_some(self, count)

    make_some = CompiledGrammar._some_of
    monkeypatch.setattr(CompiledGrammar, "_some_of", some_of)
    kept = made.prepare(params)
    found = [made(params) for _ in range(3)]
    assert counted == [3] and kept is not None and not kept.matchers
    made.prepare(params)  # and nobody keeps what it made
    gc.collect()
    found.append(made(params))
    assert counted == [3, 3]  # what waits needs none yet
    found[3].accept(tokenizer.encode("a")[0])
    assert counted == [3, 3, 1]
    assert len({id(grammar._matcher) for grammar in found}) == 4


def test_large_constraints_are_refused_while_many_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "MAX_MATCHER_CHARACTERS", 100)
    made = grammars_of(byte_level())
    params = SamplingParams(structured=Constraint.regex("a" * 40), n=2)
    prepared = made.prepare(params)
    running = made(params)
    with pytest.raises(OverloadedError, match="too many large constraints"):
        made.prepare(params)
    del prepared
    gc.collect()
    with pytest.raises(OverloadedError):  # one still runs
        made.prepare(params)
    del running
    gc.collect()
    assert made.prepare(params) is not None
    with pytest.raises(RequestError, match="for n = 3 completions 120; the limit is 100") as error:
        made.prepare(SamplingParams(structured=params.structured, n=3))
    assert error.value.param == "n"


def test_many_threads_may_compile_at_once() -> None:
    tokenizer = byte_level()
    made = grammars_of(tokenizer)
    found: list[object] = []

    def prepare(number: int) -> None:
        params = SamplingParams(structured=Constraint.regex(f"[a-c]{{{number % 3 + 1}}}"))
        found.append(made.prepare(params))

    threads = [threading.Thread(target=prepare, args=[number]) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and None not in found


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "quire.structured.vocabulary", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    made = grammars_of(byte_level())
    with pytest.raises(RequestError, match=r"pip install 'quire\[structured\]'"):
        made.prepare(SamplingParams(structured=Constraint.json_object()))


# ---- purity


def test_masks_depend_on_the_constraint_and_the_tokens_alone() -> None:
    """Whatever other completions of the same constraint did before."""
    tokenizer = smollm2()
    ends = tokenizer.end_token_ids
    constraint = Constraint.json(PERSON)
    made = grammars_of(tokenizer)
    alone = walk(made, constraint, ends, seed=1)
    for seed in range(2, 6):
        walk(made, constraint, ends, seed)
    again = walk(made, constraint, ends, seed=1)
    fresh = walk(grammars_of(tokenizer), constraint, ends, seed=1)
    assert alone == again == fresh
