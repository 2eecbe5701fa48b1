"""Answers that outlive their request: stored responses, background ones, and those of idempotency
keys."""
