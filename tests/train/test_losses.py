"""The losses against the reference implementation's numbers, and their shortcuts against the plain computation."""
