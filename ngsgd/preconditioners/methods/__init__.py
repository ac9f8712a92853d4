"""One preconditioner a file, and what several of them share."""
