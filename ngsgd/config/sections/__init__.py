"""The sections of a run's configuration, one per file."""
