"""A run on disk: its folder, its final model, its fingerprint, and the permission to import what it names."""
