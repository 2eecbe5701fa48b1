"""`quire serve` whose model is packed over and over and never loaded: arguments as serve's."""

import sys
from typing import NoReturn
from unittest import mock

import numpy as np

from quire.cli import main
from quire.executors.cpu.native import native


def packs_without_end(*_: object) -> NoReturn:
    blocks = np.zeros(1024 * 4 * 144, np.uint8)
    while True:
        native.PackedMatrix("Q4_K", blocks, num_rows=1024, in_size=1024)


if __name__ == "__main__":
    with mock.patch("quire.llm.assembly.assemble", packs_without_end):
        sys.exit(main(["serve", *sys.argv[1:], "--no-worker"]))
