"""Checks that decide whether the result of a job enters the average."""
