"""The optimizer track: frames to a fixed objective on speech, by one rule for all optimizers."""
