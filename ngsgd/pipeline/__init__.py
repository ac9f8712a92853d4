"""From a configuration to a trained model: the parts of a run, put together in one place."""
