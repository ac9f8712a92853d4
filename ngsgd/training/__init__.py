"""Data-parallel training: workers, the outer loop of the coordinator, and fault tolerance.

Fault tolerance consists of checkpoints, the ledger, and checks of results.
"""
