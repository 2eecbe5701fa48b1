"""WordTokenizer: a vocabulary for models without a tokenizer."""

from quire_bench.words import WordTokenizer


def test_every_token_is_another_text_and_any_text_comes_back() -> None:
    words = WordTokenizer(40_000)
    texts = [words.token_bytes(token) for token in range(40_000)]
    assert len(set(texts)) == 40_000 and b"" not in texts
    assert words.token_bytes(40_000) == b"", "what stands for the end of a text"
    text = '{"naïve": ["a longer text", 1234, "日本"]}'
    tokens = words.encode(text, add_special=False)
    assert b"".join(texts[token] for token in tokens).decode() == text
    assert len(tokens) < 0.6 * len(text.encode()), "words are longer than bytes"
