"""What a run writes to disk: checkpoints, the ledger, the event log, the lock, and the audit of all of them."""
