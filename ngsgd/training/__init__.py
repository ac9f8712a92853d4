"""Workers, the coordinator's outer loop, and what keeps them safe: checkpoints, ledger, acceptance."""
