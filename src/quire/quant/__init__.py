"""How weights are packed: one table of block formats, each with a plain reference decoder."""
