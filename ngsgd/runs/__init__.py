"""A run on disk: folder, final model, fingerprint, and trust in the modules it names."""
