"""Methods that keep a low-rank or sample-space form of the Fisher matrix."""
