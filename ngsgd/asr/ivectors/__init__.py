"""i-vectors: a background model, an extractor, and online estimation (C.9 of arXiv 1410.7455)."""
