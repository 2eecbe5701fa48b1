"""Where fuzzers keep what they found and learnt between runs: out of the repository."""

from pathlib import Path

HOME = Path(__file__).parent.parent.parent / ".pytest_cache" / "quire-fuzz"
