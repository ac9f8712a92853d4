"""Run folders and what is kept in them."""
