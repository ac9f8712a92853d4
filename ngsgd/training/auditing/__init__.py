"""Audit of silent data corruption: jobs are repeated on other workers, and results are compared."""
