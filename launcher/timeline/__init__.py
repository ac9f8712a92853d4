"""Use of time in a run: participation, effective training time, and a trace."""
