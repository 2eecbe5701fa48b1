"""APIs over conversations beside OpenAI's chat completions: each is its bodies, translated to a
ChatRequest, and answers translated back (server/dialect.py)."""
