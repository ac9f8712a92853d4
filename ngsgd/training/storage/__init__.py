"""Files of a run: checkpoints, ledger, event log, lock, and their audit."""
