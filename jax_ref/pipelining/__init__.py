"""Pipelines as plain definitions: which stage has what, and what schedules cost in closed form."""
