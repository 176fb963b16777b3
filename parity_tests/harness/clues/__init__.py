"""Clues: functions from evidence to sentences, each for one kind of mistake."""
