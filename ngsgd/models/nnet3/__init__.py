"""Export and import of Kaldi nnet3 raw models."""
