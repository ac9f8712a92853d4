"""Archives of training examples, sharded and shuffled deterministically; independent of speech."""
