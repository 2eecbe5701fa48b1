"""quire runs many text-generation requests through one language model together."""
