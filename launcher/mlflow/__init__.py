"""MLflow: tracker, store and model."""
