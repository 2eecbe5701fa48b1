"""Fuzzes the GGUF reader: python -m tests.fuzz.fuzz_gguf -max_total_time=300"""

from tests.fuzz.harness import run
from tests.fuzz.inputs import feed_gguf, gguf_seeds

if __name__ == "__main__":
    run("gguf", feed_gguf, gguf_seeds())
