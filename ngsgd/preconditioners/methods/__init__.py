"""Preconditioning methods, and base classes that several of them share."""
