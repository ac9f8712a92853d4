"""Whether the result of a job may enter the average."""
