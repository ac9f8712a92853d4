"""Features of large corpora: shards on disk, computed in parallel processes."""
