"""From YAML and the command line to a configuration."""
