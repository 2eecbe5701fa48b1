"""Fuzzes the safetensors reader: python -m tests.fuzz.fuzz_safetensors -max_total_time=300"""

from tests.fuzz.harness import run
from tests.fuzz.inputs import feed_safetensors, safetensors_seeds

if __name__ == "__main__":
    run("safetensors", feed_safetensors, safetensors_seeds())
