"""Embeddings of OpenAI's client, LiteLLM and Ollama's client are the same vectors."""

import sys

import litellm
import ollama
from openai import OpenAI

TEXTS = ["The cat sat.", "It is sunny."]
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
found = client.embeddings.create(model="tiny-text", input=TEXTS, encoding_format="float").data
expected = [each.embedding for each in found]
assert len(expected) == 2 and expected[0] != expected[1]
found = litellm.embedding("openai/tiny-text", TEXTS, api_base=sys.argv[1], api_key="none").data
assert [each["embedding"] for each in found] == expected
found = ollama.Client(host=sys.argv[1].removesuffix("/v1")).embed("tiny-text", TEXTS)
assert [list(each) for each in found.embeddings] == expected
