"""Corpora: from recordings or Kaldi data directories to labelled utterances."""
