"""Saving what was trained."""
