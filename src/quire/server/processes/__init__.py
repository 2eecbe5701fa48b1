"""Several API processes on one port (`--api-processes`): the process that the user starts
supervises them and the worker, and keeps what all of them share."""
