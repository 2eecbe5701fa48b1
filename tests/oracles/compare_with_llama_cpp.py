"""Compares quire with llama.cpp on a GGUF file of every family, for the file's own conventions, and
stores llama.cpp's logits as tests/fixtures/*/CASE/llama-cpp.npz, which tests compare with.

Needs an interpreter with llama-cpp-python, which the tests do not:

    pip install llama-cpp-python==0.3.36
    python -m tests.oracles.compare_with_llama_cpp PYTHON [CASE ...]

Prints the normalised mean squared error of quire's reference executor to llama.cpp and to the
golden of transformers, which differ where the file says less than config.json. Logits are stored
where they are within the bound; the exit status says whether all were.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tests.model.gguf_families import Floats
from tests.model.llama_cpp_files import (
    BOUND,
    CASES,
    DUMMIES,
    NUM_LAYERS,
    computed,
    fixture,
    nmse,
    write_case,
)


def main(interpreter: str, cases: list[str]) -> int:
    failures = 0
    print(f"{'case':28}{'llama.cpp':>12}{'transformers':>14}")
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as name:
            path = write_case(case, Path(name))
            ours = computed(case, path, as_llama_cpp=True)
            theirs = of_llama_cpp(interpreter, path, fixture(case) / "golden.npz")
            of_golden = f"{'-':>14}"
            if case not in {*NUM_LAYERS, *DUMMIES}:
                golden = nmse(computed(case, path, as_llama_cpp=False), golden_of(case))
                of_golden = f"{golden:14.1e}"
        is_right = not isinstance(theirs, str) and nmse(ours, theirs) <= BOUND
        if isinstance(theirs, str):
            print(f"{case:28}{'refused':>12}{of_golden}  {theirs}", flush=True)
        else:
            print(f"{case:28}{nmse(ours, theirs):12.1e}{of_golden}", flush=True)
        if is_right:  # half precision: far below the bound
            np.savez_compressed(fixture(case) / "llama-cpp.npz", logits=np.float16(theirs))
        failures += not is_right
    return 1 if failures else 0


def golden_of(case: str) -> Floats:
    return np.asarray(np.load(fixture(case) / "golden.npz")["logits"])


def of_llama_cpp(interpreter: str, path: Path, tokens: Path) -> Floats | str:
    """Its logits, or what it says against the file."""
    out = path.with_suffix(".npz")
    program = Path(__file__).parent / "llama_cpp_logits.py"
    command = [interpreter, str(program), str(path), str(tokens), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return np.asarray(np.load(out)["logits"])
    lines = [line for line in ran.stderr.splitlines() if "error" in line or "ASSERT" in line]
    return (lines or ran.stderr.splitlines() or [f"status {ran.returncode}"])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
