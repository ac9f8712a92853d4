"""Commands of clusters: submit, status, logs, stop, doctor, plan and simulate."""
