"""Deterministic simulation of faults: the production code of a run under one seed."""
