"""Ray: the worker pool, actors, clusters and jobs."""
