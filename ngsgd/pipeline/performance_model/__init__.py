"""How long a run will take: a probe of this machine, formulas, and a simulated cluster."""
