"""Snapshots of running jobs, from which a retry continues on any worker."""
