"""`python -m quire.worker DESCRIPTOR`: a worker over the socket that it inherited."""

import sys

from quire.worker.process import main

main(int(sys.argv[1]))
