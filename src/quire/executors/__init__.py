"""What runs plans: one small protocol, and the machinery behind it."""
