"""Low-rank Fisher estimates of `NGSGD`: one with its state, all of a model, their updates."""
