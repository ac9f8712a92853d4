"""Pages, charts and progress lines."""
