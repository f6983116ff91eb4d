"""Range operations measured on the machine at hand, and the table that comes of it."""
