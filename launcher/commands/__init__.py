"""One module per command of `ngsgd`."""
