"""Table files of Kaldi."""
