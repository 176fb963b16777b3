"""How a command ends: its exit status, what its process leaves behind, and the errors of foreign code."""
