"""How a command ends: its exit status, the records its process leaves, and the errors of foreign code."""
