"""`python -m quire.worker CHANNEL [LISTENER]`: a worker over sockets that it inherited."""

import sys

from quire.worker.process import main

main(*map(int, sys.argv[1:]))
