"""Fault injection: the component, the time and the kind of each fault, and invariants afterwards.
"""
