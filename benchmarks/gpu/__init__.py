"""One command for the first machine with a GPU: correctness, speed and memory in a few minutes."""
