"""From the results of the jobs to the next model."""
