"""Training scripts to copy, and the demo."""
