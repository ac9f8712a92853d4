"""i-vectors: a background model, an extractor, and what they tell of a speaker while he speaks (C.9 of arXiv 1410.7455)."""
