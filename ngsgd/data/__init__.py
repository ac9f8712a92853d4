"""Archives of training examples, sharded and shuffled deterministically.  Knows no speech."""
