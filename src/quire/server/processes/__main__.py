"""`python -m quire.server.processes CALLS NEWS LISTENER IDLE`: an API process, over descriptors
that it inherited."""

import sys

from quire.server.processes.api import main

main(*map(int, sys.argv[1:]))
