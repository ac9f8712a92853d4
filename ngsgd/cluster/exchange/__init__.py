"""How results reach the average: shared memory, parcels, and sums among the workers themselves."""
