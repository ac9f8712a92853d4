"""Fault injection into run folders: crash points, damaged files, power cuts, two coordinators.

    python -m tests.fuzz crash | damage | power | two-resumes | all
"""
