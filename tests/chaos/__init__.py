"""Fault injection: component, time and kind of each fault, and invariants afterwards."""
