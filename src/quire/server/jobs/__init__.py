"""Requests that come in files: lines of OpenAI's batch format, and what answers them."""
