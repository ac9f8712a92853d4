"""Trained networks as Kaldi's nnet3 raw models in text form, and back."""
