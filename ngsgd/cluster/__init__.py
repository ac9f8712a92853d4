"""Worker pools: jobs in this process, or in separate processes."""
