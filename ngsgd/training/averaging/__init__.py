"""Averaging of the results of jobs to the next model."""
