"""Lexicon, language model, HMM topology and decoding graphs."""
