"""Corpora: from recordings or Kaldi data directories to labeled utterances."""
