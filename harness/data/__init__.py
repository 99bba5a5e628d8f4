"""Data: from files or a hub to windows of tokens: formats, documents, splits, the token cache, streaming, the order of
samples, held-out documents, and the faults of a corpus."""
