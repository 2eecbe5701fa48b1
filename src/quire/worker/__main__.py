"""`python -m quire.worker CHANNEL [LISTENER]`: a worker over the sockets that it inherited, by their
descriptors."""

import sys

from quire.worker.process import main

main(*map(int, sys.argv[1:]))
