"""The nouns every layer shares: requests, plans, results, configurations, errors."""
