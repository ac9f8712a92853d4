"""Transfer of results to the average: shared memory, object store, and collectives of workers."""
